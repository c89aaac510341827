"""The GPU through NVML, where the library loads. On JetPack 7.0 it lacks memory, clocks and power: all optional.

Needs ``nvidia-ml-py``; without the package or the driver there are simply no such fields.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.board.reading import Clock

log = logging.getLogger(__name__)


@dataclass
class NvmlReading:
    """What NVML shows, by ``gpu0``, ``gpu1``, …; units as in ``BoardReading``."""

    temperatures: dict[str, float] = field(default_factory=dict)
    watts: dict[str, float] = field(default_factory=dict)
    energy: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    clocks: dict[str, Clock] = field(default_factory=dict)


class Nvml:
    """A connection to NVML, made at the first reading and never tried again once it failed."""

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._handles: list[Any] | None = None

    def read(self) -> NvmlReading:
        """One look at every GPU."""
        found = NvmlReading()
        if self._handles is None:
            self._handles = self._open()
        for index, handle in enumerate(self._handles):
            self._gpu(f"gpu{index}", handle, found)
        return found

    def _open(self) -> list[Any]:
        try:
            if self._library is None:
                self._library = importlib.import_module("pynvml")  # optional, and untyped
            library = self._library
            library.nvmlInit()
            return [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        except Exception as error:  # noqa: BLE001,RUF100  (ImportError, NVMLError, a library of another version)
            log.info("no GPU figures from NVML: %s", error)
            return []

    def _gpu(self, name: str, handle: Any, found: NvmlReading) -> None:
        library = self._library
        celsius = self._ask(lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))
        if celsius is not None:
            found.temperatures[name] = float(celsius)
        milliwatts = self._ask(lambda: library.nvmlDeviceGetPowerUsage(handle))
        if milliwatts is not None:
            found.watts[name] = milliwatts / 1e3
        millijoules = self._ask(lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle))
        if millijoules is not None:
            found.energy[name] = (millijoules / 1e3, None)
        for clock, kind in (("sm", "NVML_CLOCK_SM"), ("memory", "NVML_CLOCK_MEM")):
            current = self._megahertz("nvmlDeviceGetClockInfo", handle, kind)
            if current is not None:
                most = self._megahertz("nvmlDeviceGetMaxClockInfo", handle, kind)
                found.clocks[f"{name} {clock}"] = Clock(current, None, most)

    def _megahertz(self, call: str, handle: Any, kind: str) -> int | None:
        value = self._ask(lambda: getattr(self._library, call)(handle, getattr(self._library, kind)))
        return None if value is None else value * 1_000_000

    @staticmethod
    def _ask(call: Callable[[], Any]) -> int | None:
        """A figure, or None where this driver does not have it."""
        try:
            value = call()
        except Exception:  # noqa: BLE001,RUF100  (NVMLError has no common base with a missing function)
            return None
        return value if isinstance(value, int) else None
