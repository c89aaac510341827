"""The cases of `mjolnir verify`: few, and every pair of values of any two dimensions occurs in one of them."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

from mjolnir.runner import RunnerConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LONG = 5000


@dataclass(frozen=True)
class Case:
    """One kind of decode step.

    Attributes:
        head_size: elements of a head.
        group: query heads of a KV head.
        q_len: query tokens of each sequence.
        page_size: tokens of a page.
        causal: whether a query token sees only keys up to its own position.
        dtype: ``bf16`` or ``fp16``, of query and output.
        descale: K and V have one descale a ``tensor``, a ``head`` or a ``sequence`` and head.
        layout: logical layout of the cache.
        seed: of lengths and data.
    """

    head_size: int
    group: int
    q_len: int
    page_size: int
    causal: bool
    dtype: str
    descale: str
    layout: str
    seed: int = 0

    @property
    def num_kv_heads(self) -> int:
        """KV heads: few, and not always a power of two."""
        return 1 + self.seed % 3

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence: empty, shortest, around a page, longer, and every fourth time `LONG`."""
        rng = random.Random(self.seed)  # noqa: S311  (test data)
        around = rng.choice([self.page_size - 1, self.page_size, self.page_size + 1])
        lengths = [0, 1, around, rng.randrange(2, 1000)]
        if self.seed % 4 == 0:
            lengths.append(LONG)
        rng.shuffle(lengths)
        return tuple(max(length, self.q_len) if length else 0 for length in lengths)

    def config(self, device: torch.device) -> RunnerConfig:
        """The runner's configuration for this case."""
        return RunnerConfig(
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            page_size=self.page_size,
            out_dtype=DTYPES[self.dtype],
            max_num_seqs=len(self.lengths),
            device=device,
            max_q_len=self.q_len,
        )

    def __str__(self) -> str:
        mask = "causal" if self.causal else "non-causal"
        return (
            f"head size {self.head_size}, {self.group} heads a KV head, q_len {self.q_len}, pages of {self.page_size}, "
            f"{mask}, {self.dtype}, a descale a {self.descale}, {self.layout}"
        )


DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "head_size": (64, 128, 256),
    "group": (1, 3, 4, 6, 8, 16),
    "q_len": (1, 2, 4, 8),
    "page_size": (16, 32, 64, 128),
    "causal": (True, False),
    "dtype": ("bf16", "fp16"),
    "descale": ("tensor", "head", "sequence"),
    "layout": ("BHN2D", "BNH2D", "B2NHD", "B2HND", "2BNHD", "2BHND"),
}


def covering(count: int = 60, candidates: int = 60) -> list[Case]:
    """Cases that together have as many triples of values as a greedy choice among random candidates finds."""
    rng = random.Random(0)  # noqa: S311  (a fixed choice)
    covered: set[tuple[Any, ...]] = set()
    cases = []
    for seed in range(count):
        drawn = [{name: rng.choice(values) for name, values in DIMENSIONS.items()} for _ in range(candidates)]
        triples = [set(itertools.combinations(values.items(), 3)) for values in drawn]
        best = max(range(candidates), key=lambda number: len(triples[number] - covered))
        covered |= triples[best]
        cases.append(Case(**drawn[best], seed=seed))
    return cases
