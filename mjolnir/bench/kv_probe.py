"""Looks into an engine's KV cache as it is written: how far from the written rows is what the cache then holds?

Everything here works on an engine in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) run eagerly, by standing in
front of an attention layer's ``do_kv_cache_update``. The cache's bytes are decoded by the oracles, not by what the
engine decodes them with.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mjolnir import turning
from mjolnir.names import FP6_KV_DTYPE as FP6
from mjolnir.reference import e2m3, e4m3
from mjolnir.scales import load

if TYPE_CHECKING:
    from collections.abc import Iterator

FP8 = ("fp8", "fp8_e4m3")

Update = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer, from a scale file.

    Attributes:
        k: (num_kv_heads, head_size) float32, of an e2m3 cache.
        v: likewise.
        k_turn: (head_size, head_size), the matrix by which K is turned; None where it is not.
        v_turn: likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_turn: torch.Tensor | None = None
    v_turn: torch.Tensor | None = None

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes that an e2m3 cache has of K and V, (tokens, num_kv_heads, head_size)."""
        key = key.float() if self.k_turn is None else key.float() @ self.k_turn
        value = value.float() if self.v_turn is None else value.float() @ self.v_turn
        return e2m3.encode(key / self.k), e2m3.encode(value / self.v)

    def decode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, float32, that such codes stand for."""
        key, value = e2m3.decode(key) * self.k, e2m3.decode(value) * self.v
        key = key if self.k_turn is None else key @ self.k_turn / len(self.k_turn)
        return key, value if self.v_turn is None else value @ self.v_turn / len(self.v_turn)


def read_scales(path: Path) -> dict[str, LayerScales]:
    """The layers of a scale file that ``mjolnir calibrate`` wrote, by name.

    Raises:
        ScalesError: the file can't be used.
    """
    file = load(path)
    turn = turning.matrix(file.model.head_size)
    return {
        name: LayerScales(
            k=torch.tensor(layer.k),
            v=torch.tensor(layer.v),
            k_turn=turn if layer.k_turned else None,
            v_turn=turn if layer.v_turned else None,
        )
        for name, layer in file.layers.items()
    }


def attention_layers(model: Any) -> dict[str, Any]:
    """Attention layers of a vLLM model that write a cache, by name."""
    layers = [module for module in model.modules() if hasattr(getattr(module, "impl", None), "do_kv_cache_update")]
    return {layer.layer_name: layer for layer in layers}


def emulate_e2m3(layers: dict[str, Any], scales: dict[str, LayerScales]) -> None:
    """Round what layers write to what an e2m3 cache would hold: the format's error without our implementation of it."""
    for name, layer in layers.items():
        layer.impl.do_kv_cache_update = _rounding_update(layer.impl.do_kv_cache_update, scales[name])


def through_e2m3(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows (..., num_kv_heads, head_size) encoded and decoded, in their dtype; ``scale`` broadcasts to them."""
    return (e2m3.decode(e2m3.encode(rows.float() / scale)) * scale).to(rows.dtype)


def through_e4m3(rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """As `through_e2m3`, for an e4m3 cache with one scale."""
    return (e4m3.dequantise(e4m3.quantise(rows.float() / scale).contiguous()) * scale).to(rows.dtype)


def _rounding_update(update: Update, scales: LayerScales) -> Update:
    def rounded(
        layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        held = scales.decode(*scales.encode(key, value))
        update(layer, held[0].to(key.dtype), held[1].to(value.dtype), kv_cache, slot_mapping)

    return rounded


class Squares:
    """Sums of squares of one layer's K or V, by KV head and channel."""

    def __init__(self) -> None:
        self.error = torch.zeros(())
        self.signal = torch.zeros(())

    def add(self, rows: torch.Tensor, held: torch.Tensor) -> None:
        """Take rows (tokens, num_kv_heads, head_size), and what the cache holds of them."""
        rows = rows.double()
        self.error = self.error + (held.double() - rows).square().sum(0)
        self.signal = self.signal + rows.square().sum(0)

    def figures(self) -> dict[str, float]:
        """Relative RMS error of the whole, of the median and of the worst channel."""
        channels = (self.error / self.signal.clamp_min(1e-30)).sqrt()
        return {
            "all": float((self.error.sum() / self.signal.sum()).sqrt()),
            "median_channel": float(channels.median()),
            "worst_channel": float(channels.max()),
        }


@contextmanager
def measured(layers: dict[str, Any], kv: str, scales: dict[str, LayerScales] | None) -> "Iterator[dict[str, Any]]":
    """Measure every row that is written meanwhile; the dict has its figures by layer afterwards.

    Args:
        layers: of `attention_layers`.
        kv: the engine's ``kv_cache_dtype``.
        scales: of the engine's scale file, which an e2m3 cache can't be read without.
    """
    sums = {name: (Squares(), Squares()) for name in layers}
    saved = {name: layer.impl.do_kv_cache_update for name, layer in layers.items()}
    for name, layer in layers.items():
        own = scales[name] if scales else None
        layer.impl.do_kv_cache_update = _measuring_update(saved[name], kv, own, sums[name])
    figures: dict[str, Any] = {}
    try:
        yield figures
    finally:
        for name, layer in layers.items():
            layer.impl.do_kv_cache_update = saved[name]
    figures.update({name: {"k": k.figures(), "v": v.figures()} for name, (k, v) in sums.items()})


def _measuring_update(update: Update, kv: str, scales: LayerScales | None, into: tuple[Squares, Squares]) -> Update:
    def measuring(
        layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        update(layer, key, value, kv_cache, slot_mapping)
        tokens = slot_mapping.shape[0]
        for rows, held, sums in zip(
            (key, value), held_rows(layer, kv_cache, slot_mapping, kv, scales), into, strict=True
        ):
            sums.add(rows[:tokens], held)

    return measuring


def held_rows(
    layer: Any, kv_cache: torch.Tensor, slots: torch.Tensor, kv: str, scales: LayerScales | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache holds of some tokens, by the oracles: K and V, (tokens, num_kv_heads, head_size).

    Args:
        layer: whose cache it is.
        kv_cache: (pages, num_kv_heads, page_size, row).
        slots: (tokens,) int64, none negative.
        kv: the ``kv_cache_dtype``.
        scales: see `measured`.

    Raises:
        ValueError: an e2m3 cache without scales.
    """
    page_size = kv_cache.shape[2]
    rows = kv_cache.transpose(1, 2)[slots // page_size, slots % page_size]
    if kv == FP6:
        if scales is None:
            raise ValueError("an fp6_e2m3 cache is read with a scale file")
        key, value = (e2m3.unpack(half) for half in rows.chunk(2, dim=-1))
        return scales.decode(key, value)
    if kv in FP8:
        key, value = e4m3.dequantise(rows.contiguous()).chunk(2, dim=-1)
        return key * float(layer._k_scale), value * float(layer._v_scale)
    key, value = rows.chunk(2, dim=-1)
    return key, value
