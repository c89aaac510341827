"""What a packed cache costs a long prompt: attention of 8K-token chunks over fp8 pages and over e2m3 pages, on a CPU.

One layer's attention, by the fallback, without a model. A chunk is as long as vLLM's on a GPU, but only its last query
tokens are computed; attention takes as long for each of them, so what the whole chunk takes follows. The expansion of
pages does not depend on the queries and is measured as it is, the turn of queries and outputs likewise.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mjolnir import scratch, turning
from mjolnir.bench.quality_shapes import Shape
from mjolnir.bench.results import write_result
from mjolnir.layouts import PagedKV
from mjolnir.reference import e2m3, packed_rows, paged_sdpa

PAGE, CHUNK, QUERIES = 128, 8192, 128
CONTEXTS = (8192, 16384, 32768, 65536)
SHAPES = (Shape("135M", 9, 3, 64), Shape("8B", 32, 8, 128))
REPEATS = 3


def seconds(work: Callable[[], Any]) -> float:
    """The shortest of some runs, after one that is not counted."""
    work()
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


class Step:
    """One layer's attention of a chunk that ends a context.

    Args:
        shape: heads.
        context: tokens, the chunk's own included.
    """

    def __init__(self, shape: Shape, context: int) -> None:
        self.shape, self.pages = shape, context // PAGE
        heads, size = shape.num_kv_heads, shape.head_size
        generator = torch.Generator().manual_seed(0)
        self.query = torch.randn((QUERIES, shape.num_heads, size), generator=generator).bfloat16()
        # Bytes below 0x78 are numbers in both formats.
        self.fp8 = torch.randint(0, 0x78, (self.pages, heads, PAGE, 2 * size), dtype=torch.uint8, generator=generator)
        row = e2m3.row_bytes(size)
        packed = torch.randint(0, 0x78, (self.pages, heads, PAGE, 2 * row), dtype=torch.uint8, generator=generator)
        k, v = packed.transpose(1, 2).split(row, dim=-1)
        self.packed = PagedKV(k, v, packed)
        self.scales = torch.full((heads, size), 0.01), torch.full((heads, size), 0.01)
        self.scratch = torch.empty((self.pages, heads, PAGE, 2 * size), dtype=torch.bfloat16)
        self.turn = turning.matrix(size, torch.bfloat16)
        self.context = context

    def attend(self, queries: int, cache: torch.Tensor, float8: torch.dtype | None) -> None:
        """Attention of the last query tokens over a cache."""
        query = self.query[:queries]
        paged_sdpa.attend(
            query, torch.empty_like(query), cache, torch.arange(self.pages, dtype=torch.int32)[None],
            [0, queries], [self.context], softmax_scale=0.1, causal=True, rules=paged_sdpa.MaskRules(),
            k_scale=torch.ones(1), v_scale=torch.ones(1), float8=float8,
        )  # fmt: skip

    def row(self) -> dict[str, Any]:
        """Figures of the whole chunk, milliseconds a layer."""
        sources = torch.arange(self.pages)
        expansion = seconds(lambda: packed_rows.expand_pages(self.packed, sources, self.scratch, *self.scales))
        turns = 2 * CHUNK / QUERIES * seconds(lambda: self.query @ self.turn)
        # One query token: what is done once a step, fp8 pages made floats among it.
        once_fp8 = seconds(lambda: self.attend(1, self.fp8, torch.float8_e4m3fn))
        once = seconds(lambda: self.attend(1, self.scratch, None))
        each = (seconds(lambda: self.attend(QUERIES, self.scratch, None)) - once) / (QUERIES - 1)
        fp8 = once_fp8 + (CHUNK - 1) * each
        fp6 = expansion + turns + once + (CHUNK - 1) * each
        return {
            "shape": f"{self.shape.num_heads}/{self.shape.num_kv_heads} x {self.shape.head_size}",
            "context": self.context,
            "fp8_ms": round(1000 * fp8),
            "fp6_ms": round(1000 * fp6),
            "slower_pct": round(100 * (fp6 / fp8 - 1), 2),
            "expansion_ms": round(1000 * expansion),
            "expansion_pct": round(100 * expansion / fp6, 2),
            "turns_ms": round(1000 * turns),
            "scratch_mib": scratch_mib(self.shape, self.context),
        }


def scratch_mib(shape: Shape, context: int) -> int:
    """What is reserved for a context, of all layers together."""
    return scratch.tokens_for(context) * shape.num_kv_heads * 2 * shape.head_size * 2 >> 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    write_result(
        options.out,
        what="time of a chunk of 8,192 prompt tokens in one layer's attention, by the fallback on one core of a CPU",
        command="scripts/bench quality-prefill",
        rows=[Step(shape, context).row() for shape in SHAPES for context in CONTEXTS],
    )


if __name__ == "__main__":
    main()
