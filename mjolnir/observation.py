"""What K and V of a model look like: the largest magnitude and a histogram for each layer, KV head and channel.

An impl whose process has MJOLNIR_KV_OBSERVE set shows what it is about to write to the cache. `mjolnir.calibration`
asks for what was seen through vLLM's collective_rpc, which calls `WorkerExtension` in each worker.

Where rows are to be turned (`mjolnir.turning`), turned rows are observed.
"""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mjolnir import turning
from mjolnir.env import read_choice

# A bin is a quarter of an octave, the largest 2^16. Its upper edge is at most 19 % above what is in it.
BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE = 128, 4, -16
PLAIN, TURNED = "plain", "turned"  # values of MJOLNIR_KV_OBSERVE


class Observation:
    """Accumulators of one K or V, on the device where the rows are.

    Args:
        heads: KV heads of this rank.
        head_size: channels of each.
        device: where the rows are.
        turn: whether rows are turned.

    Attributes:
        largest: (heads, head_size) float32, of turned rows.
        histogram: (heads, head_size, BINS) int32, magnitudes by their logarithm, likewise.
        peak: (heads, head_size) float32, largest magnitude of rows as they come.
        tokens: how many.
        odd: elements that were NaN or infinite.
    """

    def __init__(self, heads: int, head_size: int, device: torch.device, turn: bool) -> None:
        self.turn = turning.matrix(head_size).to(device) if turn else None
        self.largest = torch.zeros((heads, head_size), device=device)
        self.histogram = torch.zeros((heads, head_size, BINS), dtype=torch.int32, device=device)
        self.peak = torch.zeros((heads, head_size), device=device)
        self.odd = torch.zeros((), dtype=torch.int64, device=device)
        self.tokens = 0

    def add(self, rows: torch.Tensor) -> None:
        """Take (tokens, heads, head_size) into account."""
        rows = rows.float()
        self.peak = torch.maximum(self.peak, rows.abs().amax(dim=0))
        self.odd += (~rows.isfinite()).sum()
        magnitudes = (rows if self.turn is None else rows @ self.turn).abs()
        self.largest = torch.maximum(self.largest, magnitudes.amax(dim=0))
        bins = (magnitudes.log2() - LOWEST_OCTAVE).mul_(BINS_PER_OCTAVE).nan_to_num_(0.0).clamp_(0, BINS - 1).long()
        by_channel = bins.permute(1, 2, 0)
        self.histogram.scatter_add_(2, by_channel, torch.ones_like(by_channel, dtype=torch.int32))
        self.tokens += len(rows)


class Observer:
    """Observations of this process, by layer.

    Args:
        turn: whether rows are to be turned.
    """

    def __init__(self, turn: bool) -> None:
        self.turn = turn
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
            shape = *key.shape[1:], key.device, self.turn
            self.layers[layer] = Observation(*shape), Observation(*shape)
        for rows, observation in zip((key, value), self.layers[layer], strict=True):
            observation.add(rows[: len(live)][live])

    def forget(self) -> None:
        """Start anew: what was seen so far is kept elsewhere, or was vLLM's warm-up."""
        self.layers.clear()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything seen, as arrays by ``layer|k|largest`` and the like."""
        found: dict[str, npt.NDArray[Any]] = {}
        for layer, pair in self.layers.items():
            for part, seen in zip("kv", pair, strict=True):
                found[f"{layer}|{part}|largest"] = seen.largest.cpu().numpy()
                found[f"{layer}|{part}|histogram"] = seen.histogram.cpu().numpy()
                found[f"{layer}|{part}|peak"] = seen.peak.cpu().numpy()
                found[f"{layer}|{part}|counts"] = np.array([seen.tokens, int(seen.odd)])
        return found


@functools.cache
def observer() -> Observer | None:
    """This process's observer, or None where nobody wants to know."""
    kind = read_choice("MJOLNIR_KV_OBSERVE", {PLAIN: PLAIN, TURNED: TURNED}, "")
    return Observer(kind == TURNED) if kind else None


class WorkerExtension:
    """Methods that `--worker-extension-cls` adds to every worker of an engine."""

    def mjolnir_forget(self) -> None:
        """Drop what was seen so far."""
        found = observer()
        if found is not None:
            found.forget()

    def mjolnir_save(self, folder: str) -> str:
        """Write what this rank has seen to ``rank-<number>.npz`` in a folder, as a whole or not at all.

        Returns:
            What went wrong: an exception would reach the caller as vLLM's and without its reason. Empty if nothing did.
        """
        found = observer()
        arrays = {} if found is None else found.arrays()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        target = Path(folder) / f"rank-{rank}.npz"
        staged = target.with_suffix(".part")
        try:
            with open(staged, "wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, target)
        except OSError as error:
            staged.unlink(missing_ok=True)
            return error.strerror or str(error)
        return ""
