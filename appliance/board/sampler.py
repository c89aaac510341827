"""Looks at the board once a second, in a thread of its own, and adds up the energy.

A sensor behind a slow or stuck bus holds up this thread and nothing else: the event loop only ever takes the last
sample, and a sample that has become old is not shown.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from appliance.board import jetson, sysfs
from appliance.board.energy import EnergyMeter
from appliance.board.memory import memory
from appliance.board.nvml import Nvml
from appliance.board.reading import BoardReading

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
STALE_SECONDS = 10.0

_JOIN_SECONDS = 2.0


@dataclass(frozen=True)
class Sample:
    """A reading, when it was taken (monotonic seconds), how long that took, and the energy so far by rail (J)."""

    reading: BoardReading
    at: float
    seconds: float
    joules: Mapping[str, float] = field(default_factory=dict)


def read_board(root: str = "/", nvml: Nvml | None = None) -> BoardReading:
    """One look at the board; takes milliseconds and does not raise.

    Args:
        root: where ``/sys``, ``/proc``, ``/etc`` and ``/var`` are.
        nvml: connection to NVML; None leaves it out.
    """
    sensors = sysfs.sensors(root)
    gpu = nvml.read() if nvml is not None else None
    return BoardReading(
        memory=memory(root),
        temperatures=sysfs.temperatures(root) | sensors.temperatures | (gpu.temperatures if gpu else {}),
        watts=sensors.watts | (gpu.watts if gpu else {}),
        energy=sysfs.energy(root) | (gpu.energy if gpu else {}),
        clocks=sysfs.clocks(root) | (gpu.clocks if gpu else {}),
        fan_rpm=sensors.fan_rpm,
        fan_duty=sensors.fan_duty,
        overcurrent=sensors.overcurrent,
        power_mode=jetson.power_mode(root),
        identity=jetson.identity(root),
    )


class BoardSampler:
    """Samples while its context lasts; ``latest`` may be asked from any thread at any time, at no cost."""

    def __init__(
        self,
        read: Callable[[], BoardReading],
        period: float = PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._period = period
        self._clock = clock
        self._meter = EnergyMeter()
        self._latest: Sample | None = None
        self._stop = threading.Event()
        self._sampled = threading.Event()
        # A daemon: a read that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)

    @classmethod
    def of(cls, root: str = "/", nvml: Nvml | None = None) -> "BoardSampler":
        """A sampler of the machine under ``root``."""
        return cls(lambda: read_board(root, nvml))

    def __enter__(self) -> "BoardSampler":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    def latest(self) -> Sample | None:
        """The last sample; None before the first one and when the last one is old."""
        sample = self._latest
        return sample if sample is not None and self._clock() - sample.at <= STALE_SECONDS else None

    def wait(self, seconds: float) -> bool:
        """Wait for the first sample; whether it came."""
        return self._sampled.wait(seconds)

    def sample(self) -> None:
        """Take one sample now; for the sampler's thread, and for tests without one."""
        started = self._clock()
        reading = self._read()
        ended = self._clock()
        self._meter.feed(ended, reading.watts, reading.energy)
        self._latest = Sample(reading, ended, ended - started, dict(self._meter.joules))
        self._sampled.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.sample()
            except Exception:
                log.exception("the board can't be read")  # a bug of ours: the appliance serves on without it
            self._stop.wait(self._period)
