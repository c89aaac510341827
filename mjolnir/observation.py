"""What K and V of a model look like: the largest magnitude and a histogram for each layer, KV head and channel.

An impl whose process has MJOLNIR_KV_OBSERVE set shows what it is about to write to the cache. `mjolnir.calibration`
asks for what was seen through vLLM's collective_rpc, which calls `WorkerExtension` in each worker.
"""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mjolnir.env import read_bool

# A bin is a quarter of an octave, the largest 2^16. Its upper edge is at most 19 % above what is in it.
BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE = 128, 4, -16


class Observation:
    """Accumulators of one K or V, on the device where the rows are.

    Attributes:
        largest: (heads, head_size) float32.
        histogram: (heads, head_size, BINS) int32, magnitudes by their logarithm.
        tokens: how many.
        odd: elements that were NaN or infinite.
    """

    def __init__(self, heads: int, head_size: int, device: torch.device) -> None:
        self.largest = torch.zeros((heads, head_size), device=device)
        self.histogram = torch.zeros((heads, head_size, BINS), dtype=torch.int32, device=device)
        self.odd = torch.zeros((), dtype=torch.int64, device=device)
        self.tokens = 0

    def add(self, rows: torch.Tensor) -> None:
        """Take (tokens, heads, head_size) into account."""
        magnitudes = rows.float().abs()
        self.odd += (~magnitudes.isfinite()).sum()
        self.largest = torch.maximum(self.largest, magnitudes.amax(dim=0))
        bins = (magnitudes.log2() - LOWEST_OCTAVE).mul_(BINS_PER_OCTAVE).nan_to_num_(0.0).clamp_(0, BINS - 1).long()
        by_channel = bins.permute(1, 2, 0)
        self.histogram.scatter_add_(2, by_channel, torch.ones_like(by_channel, dtype=torch.int32))
        self.tokens += len(rows)


class Observer:
    """Observations of this process, by layer."""

    def __init__(self) -> None:
        self.layers: dict[str, tuple[Observation, Observation]] = {}

    def see(self, layer: str, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Take a step's new rows into account; those without a slot are padding.

        Args:
            layer: name of the layer.
            key: (>= tokens, num_kv_heads, head_size).
            value: as ``key``.
            slot_mapping: (tokens,) int64.
        """
        live = slot_mapping >= 0
        if not bool(live.any()):
            return
        if layer not in self.layers:
            shape = *key.shape[1:], key.device
            self.layers[layer] = Observation(*shape), Observation(*shape)
        for rows, observation in zip((key, value), self.layers[layer], strict=True):
            observation.add(rows[: len(live)][live])

    def forget(self) -> None:
        """Start anew: what was seen so far was vLLM's warm-up."""
        self.layers.clear()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything seen, as arrays by ``layer|k|largest`` and the like."""
        found: dict[str, npt.NDArray[Any]] = {}
        for layer, pair in self.layers.items():
            for part, seen in zip("kv", pair, strict=True):
                found[f"{layer}|{part}|largest"] = seen.largest.cpu().numpy()
                found[f"{layer}|{part}|histogram"] = seen.histogram.cpu().numpy()
                found[f"{layer}|{part}|counts"] = np.array([seen.tokens, int(seen.odd)])
        return found


@functools.cache
def observer() -> Observer | None:
    """This process's observer, or None where nobody wants to know."""
    return Observer() if read_bool("MJOLNIR_KV_OBSERVE", False) else None


class WorkerExtension:
    """Methods that `--worker-extension-cls` adds to every worker of an engine."""

    def mjolnir_forget(self) -> None:
        """Drop what was seen so far."""
        found = observer()
        if found is not None:
            found.forget()

    def mjolnir_save(self, folder: str) -> None:
        """Write what this rank has seen to ``rank-<number>.npz`` in a folder, as a whole or not at all."""
        found = observer()
        arrays = {} if found is None else found.arrays()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        target = Path(folder) / f"rank-{rank}.npz"
        staged = target.with_suffix(".part")
        with open(staged, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        os.replace(staged, target)
