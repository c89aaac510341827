"""Packed e2m3 rows on a CPU, fast: what the executor decodes from, and whole pages expanded to floats.

Eight bytes of a plane are taken apart at once, as one int64: masks keep what a shift carries over from the next byte
out. What comes out is e4m3 bytes of 2^-6 times the values, which `mjolnir.reference.e4m3.Dequantiser` makes floats of;
a code is never a NaN. The format of a row is told in `mjolnir.reference.e2m3`, which is also what this is tested with.
"""

import torch

from mjolnir.layouts import PagedKV
from mjolnir.reference.e2m3 import channel_scales, check_expansion
from mjolnir.reference.e4m3 import Dequantiser

CODE_FACTOR = 64.0  # a code's value over that of the e4m3 byte that it is made into

# Pages expanded at once, so that the intermediate floats of a long context stay in the cache.
_PAGES_AT_ONCE = 16


def _repeated(byte: int) -> int:
    """A byte eight times over, as the signed word that PyTorch calculates with."""
    return int.from_bytes(bytes([byte]) * 8, "little", signed=True)


_CODE, _FROM_FIRST, _FROM_SECOND = _repeated(0x9F), _repeated(0x18), _repeated(0x06)
_SIGN, _LAST_BIT = _repeated(0x80), _repeated(0x01)


def unpack_to_e4m3(rows: torch.Tensor, head_size: int) -> torch.Tensor:
    """e4m3 bytes of 2^-6 times the values of packed rows.

    Args:
        rows: (..., n * row_bytes) contiguous uint8, n rows side by side.
        head_size: codes of a row, a multiple of 32.

    Returns:
        (..., n * head_size) uint8, codes in the order of channels.
    """
    quarter = head_size // 4
    words = rows.view(torch.int64).unflatten(-1, (-1, 3, quarter // 8))
    out = torch.empty((*words.shape[:-2], 4, quarter // 8), dtype=torch.int64)
    torch.bitwise_and(words, _CODE, out=out[..., :3, :])
    first, second, third = words.unbind(-2)
    fourth = (first >> 2).bitwise_and_(_FROM_FIRST)
    fourth.bitwise_or_((second >> 4).bitwise_and_(_FROM_SECOND))
    fourth.bitwise_or_((third << 1).bitwise_and_(_SIGN))
    fourth.bitwise_or_((third >> 5).bitwise_and_(_LAST_BIT))
    out[..., 3, :] = fourth
    return out.flatten(-3).view(torch.uint8)


class PackedDequantiser:
    """Dequantises packed rows into buffers that it keeps; one an owner, not for two threads."""

    def __init__(self, head_size: int) -> None:
        self._head_size = head_size
        self._e4m3 = Dequantiser()

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Values of packed rows but for a factor, as `mjolnir.reference.e4m3.Dequantiser`.

        Args:
            rows: (..., n * row_bytes) contiguous uint8, n rows side by side.

        Returns:
            (..., n * head_size) float32, good until the next call, and the factor by which it is to be multiplied.
        """
        values, factor = self._e4m3.finite(unpack_to_e4m3(rows, self._head_size))
        return values, factor * CODE_FACTOR


def expand_pages(
    kv: PagedKV,
    src_blocks: torch.Tensor,
    out: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pages as the model's floats; see `mjolnir.kernels.store.expand_pages`.

    Unlike there, ``out`` is bfloat16, float16 or float32 only, and what a page that the cache does not have expands to
    is left as it was: nothing reads it.
    """
    check_expansion(kv, src_blocks, out, k_scale, v_scale)
    heads, head_size = out.shape[1], out.shape[3] // 2
    pages = [(row, block) for row, block in enumerate(src_blocks.tolist()) if 0 <= block < kv.k.shape[0]]
    scales = torch.stack([_scales(scale, heads, head_size) for scale in (k_scale, v_scale)], dim=1)
    factors = scales.flatten(1)[:, None]  # (heads, 1, 2 * head_size)
    dequantiser = PackedDequantiser(head_size)
    for first in range(0, len(pages), _PAGES_AT_ONCE):
        targets, sources = zip(*pages[first : first + _PAGES_AT_ONCE], strict=True)
        index = torch.tensor(sources)
        values, factor = dequantiser(_pages(kv, index))
        out[torch.tensor(targets)] = (values * (factors * factor)).to(out.dtype)
    return out[: src_blocks.shape[0]]


def _pages(kv: PagedKV, index: torch.Tensor) -> torch.Tensor:
    """(len(index), heads, page_size, 2 * row) contiguous bytes: some pages of a cache."""
    k: torch.Tensor = kv.k
    v: torch.Tensor = kv.v
    if kv.fused is not None:
        fused: torch.Tensor = kv.fused
        return fused[index]
    return torch.cat([cache[index].transpose(1, 2) for cache in (k, v)], dim=-1)


def _scales(scale: torch.Tensor | None, heads: int, head_size: int) -> torch.Tensor:
    return channel_scales(torch.ones(1) if scale is None else scale, heads, head_size).float()
