"""The cells of `mjolnir bench kernel`: heads, batches, pages, and how a command line names them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mjolnir.errors import ConfigurationError
from mjolnir.reference import e2m3
from mjolnir.runner import HEAD_SIZES, PAGE_SIZES, RunnerConfig

POOL_BYTES = 1 << 31
LAYOUTS = {"NHD": "BNH2D", "HND": "BHN2D"}
KV_FORMATS = ("fp8", "e2m3")


@dataclass(frozen=True)
class Shape:
    """Heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}x{self.num_kv_heads}x{self.head_size}"


@dataclass(frozen=True)
class Batch:
    """Sequences of a step, by their lengths in tokens."""

    name: str
    lengths: tuple[int, ...]


def uniform(sequences: int, context: int) -> Batch:
    """A batch of sequences of one length."""
    return Batch(f"{sequences}x{context}", (context,) * sequences)


SHAPES = (Shape(32, 8, 128), Shape(24, 4, 256), Shape(64, 8, 128), Shape(9, 3, 64))
SKEWED = Batch("1x131072+31x1024", (131072, *(1024,) * 31))
BALANCED = Batch("32x5088", (5088,) * 32)  # as many tokens
UNIFORM = tuple(
    uniform(*pair)
    for pair in ((1, 4096), (1, 32768), (1, 131072), (4, 8192), (4, 32768), (16, 4096), (16, 16384), (64, 2048))
)
BATCHES = {
    "all": (*UNIFORM, SKEWED, BALANCED),
    "quick": (UNIFORM[0], UNIFORM[4], UNIFORM[7]),
    "skewed": (SKEWED, BALANCED),
}


@dataclass(frozen=True)
class Cell:
    """What is measured: one decode step.

    Attributes:
        shape: its heads.
        batch: its sequences.
        q_len: query tokens of each sequence.
        page_size: tokens of a page.
        layout: ``NHD`` or ``HND``, order of a page's dimensions; K and V of a token are side by side.
        kv_format: ``fp8`` or ``e2m3``.
    """

    shape: Shape
    batch: Batch
    q_len: int = 1
    page_size: int = 16
    layout: str = "NHD"
    kv_format: str = "fp8"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of K, or of V."""
        return self.shape.head_size if self.kv_format == "fp8" else e2m3.row_bytes(self.shape.head_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_size * self.shape.num_kv_heads * 2 * self.row_bytes

    @property
    def footprint(self) -> int:
        """Bytes of the pages that hold the cell."""
        return sum(-(-length // self.page_size) for length in self.batch.lengths) * self.page_bytes

    @property
    def bytes(self) -> int:
        """Bytes of K and V that a step must read."""
        return sum(self.batch.lengths) * self.shape.num_kv_heads * 2 * self.row_bytes

    def config(self, device: torch.device) -> RunnerConfig:
        """The configuration of a runner for this cell."""
        shape = self.shape
        return RunnerConfig(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            self.page_size,
            torch.bfloat16,
            len(self.batch.lengths),
            device,
            max_q_len=self.q_len,
            q_dtype="bf16",
            kv_format=self.kv_format,
        )

    def __str__(self) -> str:
        pages = f"pages of {self.page_size} {self.layout} {self.kv_format}"
        return f"{self.shape} {self.batch.name} q_len {self.q_len} {pages}"


def parse_cells(
    shapes: str = "",
    q_len: str = "1,4",
    page: str = "16,128",
    cells: str = "all",
    layout: str = "NHD",
    kv: str = "fp8,e2m3",
) -> list[Cell]:
    """Cells from a command line's words; for each head shape the batches come innermost.

    Raises:
        ConfigurationError: a word that can't be used.
    """
    if cells not in BATCHES:
        raise ConfigurationError(f"--cells {cells}: accepted: {', '.join(BATCHES)}")
    heads: Sequence[Shape] = _words("--shapes", shapes, _shape) if shapes else SHAPES
    parsed = [
        Cell(shape, batch, q, page_size, order, kv_format)
        for shape in heads
        for q in _words("--q-len", q_len, lambda word: _number(word, range(1, 33)))
        for page_size in _words("--page", page, lambda word: _number(word, PAGE_SIZES))
        for order in _words("--layout", layout, lambda word: _choice(word, tuple(LAYOUTS)))
        for kv_format in _words("--kv", kv, lambda word: _choice(word, KV_FORMATS))
        for batch in BATCHES[cells]
    ]
    for cell in parsed:
        if 2 * cell.footprint > POOL_BYTES:
            raise ConfigurationError(f"{cell}: {cell.footprint} bytes; accepted: {POOL_BYTES // 2}, half of the pool")
    return parsed


def _words(option: str, text: str, parse: Callable[[str], Any]) -> list[Any]:
    """What ``parse`` makes of each word between commas; it raises ValueError with what is accepted."""
    try:
        return [parse(word.strip()) for word in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"{option} {text}: {error}") from None


def _shape(word: str) -> Shape:
    parts = word.split("x")
    if len(parts) == 3 and all(part.isdecimal() and int(part) for part in parts):
        shape = Shape(*map(int, parts))
        if shape.num_heads % shape.num_kv_heads == 0 and shape.head_size in HEAD_SIZES:
            return shape
    sizes = ", ".join(map(str, HEAD_SIZES))
    raise ValueError(f"accepted: HEADSxKV_HEADSxHEAD_SIZE as 32x8x128, whole heads a KV head, head sizes {sizes}")


def _number(word: str, accepted: Sequence[int]) -> int:
    if word.isdecimal() and int(word) in accepted:
        return int(word)
    span = f"{accepted[0]} to {accepted[-1]}" if isinstance(accepted, range) else ", ".join(map(str, accepted))
    raise ValueError(f"accepted: {span}")


def _choice(word: str, accepted: Sequence[str]) -> str:
    if word not in accepted:
        raise ValueError(f"accepted: {', '.join(accepted)}")
    return word
