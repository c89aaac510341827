"""e2m3, the packed 6-bit KV format: slow and plain, what `mjolnir.kernels.store` is tested against.

A code is ``sign << 5 | magnitude``, a magnitude two exponent bits with bias 1 and three mantissa bits: eighths up to 2,
quarters up to 4, halves up to 7.5, which is the largest. No infinity, no NaN. The encoder rounds to nearest, ties
towards zero (spec 8.2), saturates, and makes 0 of NaN; it never produces negative zero.

A row of d codes takes 3/4 d bytes. Their order is ours, not the little-endian bit stream of spec 8.1, in which a code
needs several shifts. A row is three planes of q = d/4 bytes. Byte i of the three planes holds channels i, q + i,
2q + i and 3q + i::

    bit       7        6 5            4..0
    plane 0   sign 0   magnitude 3: bits 4, 3    magnitude 0
    plane 1   sign 1   magnitude 3: bits 2, 1    magnitude 1
    plane 2   sign 2   sign 3, magnitude 3: bit 0    magnitude 2

So a byte of plane p masked with 0x9F is an e4m3 byte whose value is 2^-6 times that of code p (spec 8.4), and the
fourth comes from the three pairs of spare bits: 11 integer operations on words of four bytes for 16 codes.

A cache cell, one token of one head, is a K row and a V row.
"""

import functools

import torch

from mjolnir.errors import ConfigurationError, LayoutError
from mjolnir.layouts import PagedKV
from mjolnir.reference import e4m3

MAX = 7.5
EXPANDED_DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)  # uint8 is e4m3

_MAGNITUDES = [*(i / 8 for i in range(16)), *(i / 4 for i in range(8, 16)), *(i / 2 for i in range(8, 16))]


def row_bytes(head_size: int) -> int:
    """Bytes of a packed row.

    Raises:
        LayoutError: ``head_size`` is no multiple of four.
    """
    if head_size <= 0 or head_size % 4:
        raise LayoutError(f"an e2m3 row holds a multiple of 4 codes; got {head_size}")
    return head_size * 3 // 4


def encode(values: torch.Tensor) -> torch.Tensor:
    """Codes of values: to nearest, ties towards zero, saturating at +-7.5; 0 for NaN.

    Args:
        values: any shape, any float dtype.

    Returns:
        uint8 below 64, same shape.
    """
    values = values.float().nan_to_num(0.0, torch.inf, -torch.inf)
    magnitudes = torch.tensor(_MAGNITUDES, device=values.device)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(values.abs(), midpoints)  # a midpoint belongs to what is below it
    negative = (values < 0) & (codes > 0)
    return (codes | negative.long() << 5).to(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values of codes, float32, same shape."""
    table = torch.tensor([sign * value for sign in (1.0, -1.0) for value in _MAGNITUDES], device=codes.device)
    return table[_checked_codes(codes).long()]


def to_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The e4m3 bytes of the same values; exact for all 64 codes."""
    return _e4m3_table(codes.device)[_checked_codes(codes).long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Rows of codes to rows of bytes.

    Args:
        codes: (..., d) uint8 below 64.

    Returns:
        (..., row_bytes(d)) uint8.

    Raises:
        LayoutError: d is no multiple of four, or the codes are not uint8.
    """
    row_bytes(codes.shape[-1])
    quarters = _checked_codes(codes).int().chunk(4, dim=-1)
    first, second, third = ((code & 0x20) << 2 | code & 0x1F for code in quarters[:3])
    fourth = quarters[3]
    planes = [
        first | (fourth >> 3 & 3) << 5,
        second | (fourth >> 1 & 3) << 5,
        third | (fourth >> 5 & 1) << 6 | (fourth & 1) << 5,
    ]
    return torch.cat(planes, dim=-1).to(torch.uint8)


def unpack(rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes to rows of codes: the inverse of `pack`.

    Raises:
        LayoutError: the rows are no multiple of three bytes, or not uint8.
    """
    if rows.dtype != torch.uint8 or rows.shape[-1] % 3 or not rows.shape[-1]:
        raise LayoutError(f"e2m3 rows are uint8 of a multiple of 3 bytes; got {rows.dtype} of {tuple(rows.shape)}")
    planes = [plane.int() for plane in rows.chunk(3, dim=-1)]
    codes = [plane >> 7 << 5 | plane & 0x1F for plane in planes]
    spare = [plane >> 5 & 3 for plane in planes]
    codes.append((spare[2] >> 1) << 5 | spare[0] << 3 | spare[1] << 1 | spare[2] & 1)
    return torch.cat(codes, dim=-1).to(torch.uint8)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv: PagedKV,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write K and V of new tokens, divided by their scales, into their slots; see `mjolnir.kernels.store.write_kv`."""
    check_new_rows(key, value, kv, slot_mapping)
    pages, page_size = kv.k.shape[:2]
    slots = slot_mapping.long()
    live = (slots >= 0) & (slots < pages * page_size)
    slots = slots[live]
    for cache, rows, scale in ((kv.k, key, k_scale), (kv.v, value, v_scale)):
        cells: torch.Tensor = cache
        scaled = rows[: len(live)][live].float() / channel_scales(scale, *key.shape[1:]).float()
        cells[slots // page_size, slots % page_size] = pack(encode(scaled))


def expand_pages(
    kv: PagedKV,
    src_blocks: torch.Tensor,
    out: torch.Tensor,
    k_ratio: torch.Tensor | None = None,
    v_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pages as e4m3 or floats; see `mjolnir.kernels.store.expand_pages`."""
    check_expansion(kv, src_blocks, out, k_ratio, v_ratio)
    head_size = out.shape[3] // 2
    for row, block in enumerate(src_blocks.tolist()):
        for half, cache, ratio in ((0, kv.k, k_ratio), (1, kv.v, v_ratio)):
            part = out[row, :, :, half * head_size : (half + 1) * head_size]
            if not 0 <= block < cache.shape[0]:
                part.zero_()
                continue
            page: torch.Tensor = cache[block]
            codes = unpack(page.transpose(0, 1))
            values = decode(codes) if ratio is None else decode(codes) * ratio[:, None]
            part.copy_(e4m3.quantise(values) if out.dtype == torch.uint8 else values)
    return out[: src_blocks.shape[0]]


def channel_scales(scale: torch.Tensor, heads: int, head_size: int) -> torch.Tensor:
    """A view of shape (heads, head_size) of scales for a tensor (one element), heads, or heads and channels.

    Raises:
        ConfigurationError: another shape.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(heads, head_size)
    if scale.shape == (heads,):
        return scale[:, None].expand(heads, head_size)
    if scale.shape == (heads, head_size):
        return scale
    raise ConfigurationError(
        f"KV scale of shape {tuple(scale.shape)}: accepted: 1 element, ({heads},) or ({heads}, {head_size})"
    )


def check_new_rows(key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Check what `write_kv` gets, but for the scales.

    Raises:
        LayoutError: shapes, strides or dtypes do not fit each other.
    """
    for name, rows in (("key", key), ("value", value)):
        if rows.dim() != 3 or rows.shape[1:] != key.shape[1:] or rows.stride(2) != 1:
            raise LayoutError(
                f"{name} of shape {tuple(rows.shape)} with strides {rows.stride()} must be (tokens, heads, head size), "
                "as the other, with unit stride on the last"
            )
        if slot_mapping.dim() != 1 or rows.shape[0] < slot_mapping.shape[0]:
            raise LayoutError(f"slot mapping of shape {tuple(slot_mapping.shape)} for {rows.shape[0]} tokens of {name}")
    _check_cache(kv, key.shape[1], key.shape[2])


def check_expansion(
    kv: PagedKV,
    src_blocks: torch.Tensor,
    out: torch.Tensor,
    k_ratio: torch.Tensor | None,
    v_ratio: torch.Tensor | None,
) -> None:
    """Check what `expand_pages` gets.

    Raises:
        LayoutError: shapes, strides or dtypes do not fit each other.
        ConfigurationError: ratios that are not (heads, head size).
    """
    page_size, heads, row = kv.k.shape[1:]
    head_size = row * 4 // 3
    _check_cache(kv, heads, head_size)
    fits = out.dim() == 4 and out.shape[1:] == (heads, page_size, 2 * head_size) and out.dtype in EXPANDED_DTYPES
    if not fits or out.stride(3) != 1:
        raise LayoutError(
            f"pages expand into uint8 or floats (pages, {heads}, {page_size}, {2 * head_size}) with unit stride on "
            f"the last; got {out.dtype} of {tuple(out.shape)} with strides {out.stride()}"
        )
    if src_blocks.dim() != 1 or src_blocks.shape[0] > out.shape[0]:
        raise LayoutError(f"{tuple(src_blocks.shape)} pages do not expand into {out.shape[0]}")
    for name, ratio in (("K", k_ratio), ("V", v_ratio)):
        if ratio is not None and (ratio.shape != (heads, head_size) or ratio.dtype != torch.float32):
            raise ConfigurationError(
                f"{name} ratios {ratio.dtype} of shape {tuple(ratio.shape)}: "
                f"accepted: float32 ({heads}, {head_size}) or None"
            )


def _check_cache(kv: PagedKV, heads: int, head_size: int) -> None:
    k: torch.Tensor = kv.k
    v: torch.Tensor = kv.v
    if k.dim() != 4 or k.shape[2:] != (heads, row_bytes(head_size)) or k.dtype != torch.uint8:
        raise LayoutError(
            f"an e2m3 cache of {heads} heads of {head_size} is uint8 (pages, page size, {heads}, "
            f"{row_bytes(head_size)}); got {k.dtype} of {tuple(k.shape)}"
        )
    if v.shape != k.shape or v.dtype != k.dtype or v.stride() != k.stride() or k.stride(3) != 1:
        raise LayoutError(
            f"K and V want the same shape and strides, unit on the last; got {tuple(k.shape)} with {k.stride()} "
            f"and {tuple(v.shape)} with {v.stride()}"
        )


def _checked_codes(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.uint8:
        raise LayoutError(f"e2m3 codes are uint8; got {codes.dtype}")
    return codes


@functools.cache
def _e4m3_table(device: torch.device) -> torch.Tensor:
    """(64,) uint8: the e4m3 byte of each code."""
    subnormal = [0x00, 0x20, 0x28, 0x2C, 0x30, 0x32, 0x34, 0x36]
    positive = [*subnormal, *(code + 0x30 for code in range(8, 32))]
    return torch.tensor([*positive, *(byte | 0x80 for byte in positive)], dtype=torch.uint8, device=device)
