"""Is there memory for a start? CPU and GPU share it on Thor, and a board that runs out of it locks up."""

import asyncio
import logging
import os
import time
from collections.abc import Callable

from appliance.board.memory import memory
from appliance.command import flag_names, has_gpu
from appliance.errors import NoRoomError, SettingsError
from appliance.settings import Settings

log = logging.getLogger(__name__)

GIB = 2**30
# Thor: 3.7 GiB of 122; a laptop with 16 GiB: 0.5.
_FLOOR_SHARE = 0.03
_LEAST_FLOOR, _MOST_FLOOR = GIB // 2, 4 * GIB
_INTEGRATED_GPU = ("/dev/nvgpu", "/dev/nvmap", "/dev/nvhost-gpu")
_LOOK_SECONDS = 0.2
_STILL_LOOKS = 3  # in a row without a rise, until memory counts as settled
_NOISE = 64 << 20  # bytes; what other programs move
_QUANTISED = {"--quantization", "--load-format"}  # what is loaded is not what stands in the files


class Headroom:
    """The machine's memory as a start needs it.

    Args:
        settings: of the appliance.
        root: folder that stands for ``/``.
        shared: whether the engine's memory is the machine's; None finds out.
    """

    def __init__(self, settings: Settings, root: str = "/", shared: bool | None = None) -> None:
        self._settings = settings
        self._root = root
        self._shared = shares_memory() if shared is None else shared

    def available(self) -> int | None:
        """Bytes that can be had without swapping; None where the machine does not tell."""
        return memory(self._root).available

    @property
    def floor(self) -> int:
        """Bytes below which a start is ended."""
        if self._settings.memory_floor_gib is not None:
            return int(self._settings.memory_floor_gib * GIB)
        total = memory(self._root).total or 0
        return min(_MOST_FLOOR, max(_LEAST_FLOOR, int(total * _FLOOR_SHARE)))

    def below_floor(self) -> int | None:
        """Bytes available if they are less than the floor, else None."""
        available = self.available()
        return available if available is not None and available < self.floor else None

    def check(self, weights: int) -> None:
        """See whether a model fits now, and log the figures.

        Args:
            weights: bytes of the model's files; 0 where they are not known.

        Raises:
            SettingsError: it can't ever fit into this machine.
            NoRoomError: it does not fit now.
        """
        seen = memory(self._root)
        figures = [(value or 0) / GIB for value in (seen.available, seen.free, seen.cached)]
        log.info("memory: %.1f GiB available, %.1f free, %.1f cached; weights: %.2f GiB", *figures, weights / GIB)
        resident, need, told = self._need(weights)
        self.check_total(weights)
        if not resident or seen.available is None:
            return
        if need > seen.available:
            raise NoRoomError(f"not enough memory: {told} are needed and {seen.available / GIB:.1f} GiB available")
        peak = need + resident
        if peak > seen.available:
            log.warning(
                "loading may hold the weights twice for a while: %.1f GiB, and %.1f are available; a start that gets "
                "below %.1f GiB is ended",
                *(value / GIB for value in (peak, seen.available, self.floor)),
            )

    def check_total(self, weights: int) -> None:
        """See whether a model can fit into this machine at all.

        Raises:
            SettingsError: it can't.
        """
        total = memory(self._root).total
        resident, need, told = self._need(weights)
        if resident and total is not None and need > total:
            raise SettingsError(
                f"model={self._settings.model!r}: {told} do not fit into {total / GIB:.1f} GiB of memory; "
                "accepted: a smaller model, kv_cache_gib or memory_floor_gib"
            )

    def _need(self, weights: int) -> tuple[int, int, str]:
        """Bytes of the weights and of all that has to fit, and both in words; weights of 0 can't be judged."""
        resident = 0 if not self._shared or flag_names(self._settings.engine_args) & _QUANTISED else weights
        kv = (self._settings.kv_cache_gib or 0) * GIB
        told = f"{resident / GIB:.1f} GiB of weights, {kv / GIB:.1f} of KV cache and {self.floor / GIB:.1f} of floor"
        return resident, resident + kv + self.floor, told

    async def settle(self, limit: float) -> float:
        """Wait until the memory of an engine that has ended is seen to be back: until it rises no more.

        Args:
            limit: longest wait, seconds.

        Returns:
            Seconds that were waited.
        """
        return await settled(self.available, limit)


async def settled(available: Callable[[], int | None], limit: float, look: float = _LOOK_SECONDS) -> float:
    """Wait until ``available`` has not risen for three looks, at most ``limit`` seconds; the seconds it took."""
    began = time.monotonic()
    best, still = available(), 0
    while best is not None and still < _STILL_LOOKS and time.monotonic() - began + look <= limit:
        await asyncio.sleep(look)
        seen = available() or 0
        still = still + 1 if seen <= best + _NOISE else 0
        best = max(best, seen)
    return time.monotonic() - began


def shares_memory() -> bool:
    """Whether the engine's memory is this machine's: on a CPU, and with an integrated GPU."""
    return not has_gpu() or any(os.path.exists(node) for node in _INTEGRATED_GPU)
