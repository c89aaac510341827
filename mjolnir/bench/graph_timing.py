"""Times of GPU launches: medians over replays of a CUDA graph, and the time that reading the same bytes takes.

A graph has many launches, each on another buffer of a pool that is larger than the L2 cache, so that every launch
reads memory; the launches' own cost on the host is left out, as it is when an engine replays its graphs.
"""

import math
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

GRAPH_US = 2500.0  # a graph takes as long, so that an event's resolution (about 0.5 us) is no part of the figure
MOST_ROUNDS = 8
SLOW_US = 2000.0  # of launches slower than this a graph has as many as fit `SLOW_GRAPH_US`
SLOW_GRAPH_US = 8000.0
REPLAYS = 15
SLOW_REPLAYS = 5  # for graphs of more than `SLOW_REPLAY_US`
SLOW_REPLAY_US = 20_000.0
# Words of a block, warps, programs of an SM (None: one a block). On an H200 each was the fastest for some size.
READERS = ((4096, 8, 8), (4096, 4, 8), (8192, 8, 4), (2048, 4, 16), (4096, 8, None))
ROTATED_BYTES = 520_000_000  # a rotation of buffers, 8 times an H200's L2 cache of 60 MB
MOST_BUFFERS = 192  # which keeps a rotation of the smallest cell, 1.5 MiB, above 300 MB

Launch = Callable[[int], None]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch.

    Attributes:
        us: median over replays.
        low_us: least.
        high_us: most.
        launches: launches of the graph.
        last_buffer: buffer of the graph's last launch.
    """

    us: float
    low_us: float
    high_us: float
    launches: int
    last_buffer: int


class Timer(Protocol):
    """What times launches."""

    def __call__(self, launch: Launch, buffers: int, out: torch.Tensor | None = None) -> Timing:
        """Time a launch; see `time_launches`."""


def time_launches(launch: Launch, buffers: int, out: torch.Tensor | None = None) -> Timing:
    """Time a launch by replaying a graph of many.

    Args:
        launch: launches on a buffer, given by its number; capturable.
        buffers: how many there are.
        out: filled with NaN ahead of the replays, so that it shows afterwards whether they wrote it.
    """
    for buffer in range(min(2, buffers)):  # compiles
        launch(buffer)
    probes = range(min(4, buffers))

    def probe() -> None:
        for buffer in probes:
            launch(buffer)

    estimate = _elapsed_us(probe) / len(probes)
    launches = launches_of_graph(estimate, buffers)
    graph = _captured(launch, launches, buffers)
    if out is not None:
        out.fill_(torch.nan)
    for _ in range(2):
        graph.replay()
    replays = REPLAYS if estimate * launches < SLOW_REPLAY_US else SLOW_REPLAYS
    times = [_elapsed_us(graph.replay) / launches for _ in range(replays)]
    return Timing(statistics.median(times), min(times), max(times), launches, (launches - 1) % buffers)


def launches_of_graph(estimate_us: float, buffers: int) -> int:
    """Launches of a graph: whole rotations of the buffers, but for slow launches."""
    rotation = estimate_us * buffers
    launches = buffers * (1 if rotation > GRAPH_US else min(MOST_ROUNDS, math.ceil(GRAPH_US / rotation)))
    return min(launches, max(2, int(SLOW_GRAPH_US / estimate_us))) if estimate_us > SLOW_US else launches


def rotated_buffers(buffer_bytes: int, pool_bytes: int) -> int:
    """Buffers of a rotation, at least two.

    Args:
        buffer_bytes: bytes that a launch reads.
        pool_bytes: bytes of the pool that the buffers are cut from.
    """
    return max(2, min(MOST_BUFFERS, math.ceil(ROTATED_BYTES / buffer_bytes), pool_bytes // buffer_bytes))


class ReadCeiling:
    """The time that merely reading a number of bytes takes on this device: the best of a few plain kernels."""

    def __init__(self, pool: torch.Tensor, timer: Timer = time_launches) -> None:
        """Read from ``pool``, (bytes,) uint8."""
        self._words = pool.view(torch.int32)
        self._sums = torch.empty(1 << 20, dtype=torch.int32, device=pool.device)
        self._timer = timer
        self._known: dict[int, float] = {}

    def us(self, size: int) -> float:
        """Microseconds of reading ``size`` bytes, a multiple of four."""
        if size not in self._known:
            self._known[size] = min(self._read_us(size // 4, *reader) for reader in READERS)
        return self._known[size]

    def _read_us(self, words: int, block: int, warps: int, programs_per_sm: int | None) -> float:
        blocks = -(-words // block)
        programs = blocks
        if programs_per_sm is not None:
            sms = torch.cuda.get_device_properties(self._words.device).multi_processor_count
            programs = min(blocks, sms * programs_per_sm)
        rounds = -(-blocks // programs)

        def launch(buffer: int) -> None:
            part = self._words[buffer * words : (buffer + 1) * words]
            # grid: each program takes every ``programs``-th block
            _read_kernel[(programs,)](part, self._sums, words, rounds, BLOCK=block, num_warps=warps)

        return self._timer(launch, rotated_buffers(4 * words, 4 * self._words.numel())).us


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(words, sums, count, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One program reads every num_programs-th block, and stores a sum so that no load can be left out."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(rounds):
        total += tl.load(words + offsets, mask=offsets < count, other=0)
        offsets += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.store(sums + program, tl.sum(total, 0))


def driver_version() -> str:
    """Version of NVIDIA's driver, or ``unknown``."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0].strip() or "unknown"


def _elapsed_us(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1000


def _captured(launch: Launch, launches: int, buffers: int) -> Any:
    """A graph of launches that go round the buffers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(launches):
            launch(number % buffers)
    return graph
