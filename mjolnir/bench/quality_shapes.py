"""Error of KV cache formats on the shapes of larger models, by the oracles alone: random K and V, no model.

No weights are needed, and none are to be had offline. What real K looks like that random numbers do not is put in by
hand: a few channels that are far larger than the others, and a few whose values stand around a large constant.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mjolnir import turning
from mjolnir.bench.kv_probe import through_e2m3, through_e4m3
from mjolnir.bench.results import write_result
from mjolnir.reference import e2m3, e4m3

TOKENS = 8192
CALIBRATION = 8192  # other tokens of the same kind, from which scales are taken
LARGE = 40.0  # times the other channels
QUERIES = 32  # query tokens
SCORE_SPREAD = 2.0  # standard deviation of scores: a few hundred of the tokens matter


@dataclass(frozen=True)
class Shape:
    """A model's attention.

    Attributes:
        model: which class of models has it.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: channels.
    """

    model: str
    num_heads: int
    num_kv_heads: int
    head_size: int


SHAPES = (Shape("135M", 9, 3, 64), Shape("8B", 32, 8, 128), Shape("27B", 24, 4, 256))
# Rows of K or V are (tokens, num_kv_heads, head_size) float32.
Maker = Callable[[Shape, int, torch.Generator], torch.Tensor]
Cache = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (calibration rows, rows): what is held of the latter


def normal(shape: Shape, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """All channels alike."""
    return torch.randn(tokens, shape.num_kv_heads, shape.head_size, generator=generator)


def large_channels(shape: Shape, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """One channel in 32 is `LARGE` times as large."""
    rows = normal(shape, tokens, generator)
    rows[..., ::32] *= LARGE
    return rows


def offset_channels(shape: Shape, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """One channel in 32 is a constant, `LARGE` times the spread around it."""
    rows = normal(shape, tokens, generator)
    rows[..., ::32] += LARGE
    return rows


KINDS: dict[str, Maker] = {"normal": normal, "large channels": large_channels, "offset channels": offset_channels}


def _e4m3_scaled(seen: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return through_e4m3(rows, float(seen.abs().max()) / e4m3.MAX)


def _e2m3_by_channel(share: float) -> Cache:
    def cache(seen: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        magnitudes = seen.abs()
        # kthvalue and not quantile, which takes no input of this size.
        bound = magnitudes.kthvalue(max(1, round(share * len(seen))), dim=0).values
        return through_e2m3(rows, bound / e2m3.MAX)

    return cache


def _e2m3_by_head(seen: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return through_e2m3(rows, seen.abs().amax(dim=(0, 2))[:, None] / e2m3.MAX)


def _e2m3_turned(seen: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    size = rows.shape[-1]
    turn = turning.matrix(size) / size**0.5
    return through_e2m3(rows @ turn, (seen @ turn).abs().amax(0) / e2m3.MAX) @ turn


CACHES: dict[str, Cache] = {
    "fp8": lambda _seen, rows: through_e4m3(rows),
    "fp8, scales": _e4m3_scaled,
    "fp6, max": _e2m3_by_channel(1.0),
    "fp6, percentile 99.9": _e2m3_by_channel(0.999),
    "fp6, max by head": _e2m3_by_head,
    "fp6, turned": _e2m3_turned,
}


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS of the difference over the RMS of what is exact."""
    return float((found - exact).norm() / exact.norm())


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Outputs of query rows (num_kv_heads, rows, head_size), whose scores need no more scaling; of the same shape."""
    weights = torch.einsum("hrd,thd->hrt", query, keys).softmax(dim=-1)
    return torch.einsum("hrt,thd->hrd", weights, values)


def measure(shape: Shape, kind: str) -> list[dict[str, Any]]:
    """One row a cache: relative RMS error of K, of V, and of the attention output over both."""
    generator = torch.Generator().manual_seed(0)
    make = KINDS[kind]
    seen_k, keys = (make(shape, tokens, generator) for tokens in (CALIBRATION, TOKENS))
    seen_v, values = (normal(shape, tokens, generator) for tokens in (CALIBRATION, TOKENS))
    rows_of_head = QUERIES * shape.num_heads // shape.num_kv_heads
    query = torch.randn(shape.num_kv_heads, rows_of_head, shape.head_size, generator=generator)
    # A model's weights make scores of a sensible spread, whatever the size of K's channels.
    query *= SCORE_SPREAD / shape.head_size**0.5 / keys.std(dim=0)[:, None]
    exact = attention(query, keys, values)
    rows = []
    for name, cache in CACHES.items():
        held_k, held_v = cache(seen_k, keys), cache(seen_v, values)
        rows.append(
            {
                "model": shape.model,
                "shape": f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_size}",
                "k": kind,
                "case": name,
                "k_error": round(relative_error(held_k, keys), 4),
                "v_error": round(relative_error(held_v, values), 4),
                "output_error": round(relative_error(attention(query, held_k, held_v), exact), 4),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    options = parser.parse_args(arguments)
    write_result(
        options.out,
        what="error of KV cache formats on random K and V of larger shapes, by the oracles",
        command="scripts/bench quality-shapes",
        rows=[row for shape in SHAPES for kind in KINDS for row in measure(shape, kind)],
    )


if __name__ == "__main__":
    main()
