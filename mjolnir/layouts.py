"""Logical layouts of a paged KV cache, and zero-copy views of K and V in them.

Names give the order of the dimensions: B pages, H KV heads, N tokens of a page, D elements (or packed bytes) of
one K or V row; ``2D`` is K and V of a token side by side, a leading ``2`` a dimension that tells K from V. The
physical order lives in the strides.
"""

from dataclasses import dataclass
from typing import Protocol

from mjolnir.errors import LayoutError


class _Tensor(Protocol):
    """What a view needs of a tensor: slicing, transposing, a shape. Keeps this module free of torch."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: object) -> "_Tensor": ...
    def transpose(self, first: int, second: int) -> "_Tensor": ...


@dataclass(frozen=True)
class PagedKV:
    """K and V of one layer, without a copy.

    Attributes:
        k: shape (pages, page_size, num_kv_heads, row), any strides.
        v: as ``k``.
        fused: shape (pages, num_kv_heads, page_size, 2 * row), the same memory with K and V of a token side by
            side; None where the layout does not store them so.
    """

    k: "_Tensor"
    v: "_Tensor"
    fused: "_Tensor | None" = None


def detect_layout(shape: tuple[int, ...], num_kv_heads: int, page_size: int, row: int) -> str:
    """Name the layout of a KV cache from its shape; ties (as many heads as tokens) go to the first that fits.

    Args:
        shape: shape of the cache tensor of one layer.
        num_kv_heads: KV heads on this rank.
        page_size: tokens of a page.
        row: elements, or packed bytes, of one K row.

    Raises:
        LayoutError: no layout fits.
    """
    heads_first, tokens_first = (num_kv_heads, page_size), (page_size, num_kv_heads)
    candidates = {
        "BHN2D": len(shape) == 4 and shape[1:] == (*heads_first, 2 * row),
        "BNH2D": len(shape) == 4 and shape[1:] == (*tokens_first, 2 * row),
        "B2NHD": len(shape) == 5 and shape[1:] == (2, *tokens_first, row),
        "B2HND": len(shape) == 5 and shape[1:] == (2, *heads_first, row),
        "2BNHD": len(shape) == 5 and shape[0] == 2 and shape[2:] == (*tokens_first, row),
        "2BHND": len(shape) == 5 and shape[0] == 2 and shape[2:] == (*heads_first, row),
    }
    for name, fits in candidates.items():
        if fits:
            return name
    raise LayoutError(
        f"KV cache of shape {tuple(shape)} fits no layout for {num_kv_heads} KV heads, pages of {page_size} tokens "
        f"and rows of {row}; set MJOLNIR_ATTN_KV_LAYOUT to one of {', '.join(candidates)}, "
        "or MJOLNIR_ATTN_DISABLE=1"
    )


def split_kv(cache: "_Tensor", layout: str, row: int) -> PagedKV:
    """Views of K and V of one layer's cache.

    Args:
        cache: the cache tensor, in ``layout``.
        layout: one of the six names.
        row: elements, or packed bytes, of one K row.

    Raises:
        LayoutError: the tensor does not have that layout's dimensions.
    """
    dimensions = 4 if layout.endswith("2D") else 5
    if len(cache.shape) != dimensions:
        raise LayoutError(f"KV cache of shape {tuple(cache.shape)} is not {layout}: it needs {dimensions} dimensions")
    if layout in ("BHN2D", "BNH2D"):
        fused = cache if layout == "BHN2D" else cache.transpose(1, 2)
        tokens_first = fused.transpose(1, 2)
        return PagedKV(tokens_first[..., :row], tokens_first[..., row:], fused)
    halves = cache.transpose(0, 1) if layout.startswith("B2") else cache
    k, v = halves[0], halves[1]
    if layout.endswith("HND"):
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return PagedKV(k, v)
