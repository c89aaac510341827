"""Into and out of a paged e2m3 cache: new tokens' K and V encoded, packed and stored; whole pages expanded.

The format of codes and rows is told in `mjolnir.reference.e2m3`. Inside the kernels a code is the byte that it is in
a plane: sign in bit 7, magnitude in bits 4..0.
"""

import torch
import triton
import triton.language as tl

from mjolnir.layouts import PagedKV
from mjolnir.reference.e2m3 import channel_scales, check_expansion, check_new_rows

# Eight codes of each of the four quarters of a row for every thread, 16 bytes of a 2-byte dtype. Not measured yet.
WARPS = 2
QUADS = 32 * WARPS * 8


@triton.jit
def _encode(x):
    """Codes of f32 values; to nearest, ties towards zero. Every step is exact, so the one rounding is the ceiling's."""
    size = tl.where(x == x, tl.minimum(tl.abs(x), 7.5), 0.0)  # noqa: PLR0124  (false for NaN)
    steps = tl.where(size < 2.0, 8.0, tl.where(size < 4.0, 4.0, 2.0))  # of a unit
    ahead = tl.where(size < 2.0, 0.0, tl.where(size < 4.0, 8.0, 16.0))
    magnitude = (tl.ceil(size * steps - 0.5) + ahead).to(tl.int32)
    return magnitude | tl.where((x < 0.0) & (magnitude > 0), 0x80, 0)


@triton.jit
def _encode_quarter(
    ROWS,
    SCALE,
    row_at,  # (rows,) int64
    live,
    head,
    channel,  # (D / 4,) int32
    SCALE_HEAD_STRIDE: tl.constexpr,
    SCALE_CHANNEL_STRIDE: tl.constexpr,
):
    """Codes of a quarter of each row, (rows, D / 4) int32."""
    x = tl.load(ROWS + row_at[:, None] + channel[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    scale_at = (head * SCALE_HEAD_STRIDE)[:, None]
    if SCALE_CHANNEL_STRIDE != 0:
        scale_at += (channel * SCALE_CHANNEL_STRIDE)[None, :]
    scale = tl.load(SCALE + scale_at).to(tl.float32)
    return _encode(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))


@triton.jit
def _write_rows(
    ROWS,
    CACHE,
    SCALE,
    row_at,
    cell_at,  # (rows,) int64
    live,
    head,
    SCALE_HEAD_STRIDE: tl.constexpr,
    SCALE_CHANNEL_STRIDE: tl.constexpr,
    D: tl.constexpr,
):
    QUARTER: tl.constexpr = D // 4
    i = tl.arange(0, QUARTER)
    a = _encode_quarter(ROWS, SCALE, row_at, live, head, i, SCALE_HEAD_STRIDE, SCALE_CHANNEL_STRIDE)
    b = _encode_quarter(ROWS, SCALE, row_at, live, head, i + QUARTER, SCALE_HEAD_STRIDE, SCALE_CHANNEL_STRIDE)
    c = _encode_quarter(ROWS, SCALE, row_at, live, head, i + 2 * QUARTER, SCALE_HEAD_STRIDE, SCALE_CHANNEL_STRIDE)
    fourth = _encode_quarter(ROWS, SCALE, row_at, live, head, i + 3 * QUARTER, SCALE_HEAD_STRIDE, SCALE_CHANNEL_STRIDE)
    a |= (fourth & 0x18) << 2
    b |= (fourth & 0x06) << 4
    c |= (fourth & 0x80) >> 1 | (fourth & 0x01) << 5
    at = CACHE + cell_at[:, None] + i[None, :]
    tl.store(at, a.to(tl.uint8), mask=live[:, None])
    tl.store(at + QUARTER, b.to(tl.uint8), mask=live[:, None])
    tl.store(at + 2 * QUARTER, c.to(tl.uint8), mask=live[:, None])


# KEY, VALUE and the caches are aligned in every call of an engine, and wide loads and stores want to know it.
@triton.jit(
    do_not_specialize=["tokens", "num_slots"],
    do_not_specialize_on_alignment=["SLOT_MAPPING", "K_SCALE", "V_SCALE"],
)
def write_kernel(
    KEY,  # (>= tokens, HEADS, D) any float dtype; strides below
    VALUE,
    K,  # paged, bytes
    V,
    SLOT_MAPPING,  # (tokens,) int64 or int32
    K_SCALE,
    V_SCALE,
    tokens,
    num_slots,  # pages * PAGE
    KEY_TOKEN_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_TOKEN_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    K_SCALE_HEAD_STRIDE: tl.constexpr,
    K_SCALE_CHANNEL_STRIDE: tl.constexpr,
    V_SCALE_HEAD_STRIDE: tl.constexpr,
    V_SCALE_CHANNEL_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,  # of K and V, bytes
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two
):
    """One program writes ``ROWS`` rows, one of a token and head each, of K or of V."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    head = row % HEADS
    slot = tl.load(SLOT_MAPPING + token, mask=token < tokens, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    cell_at = slot // PAGE * PAGE_STRIDE + slot % PAGE * TOKEN_STRIDE + head * HEAD_STRIDE
    if tl.program_id(1) == 0:
        row_at = token * KEY_TOKEN_STRIDE + head * KEY_HEAD_STRIDE
        _write_rows(KEY, K, K_SCALE, row_at, cell_at, live, head, K_SCALE_HEAD_STRIDE, K_SCALE_CHANNEL_STRIDE, D)
    else:
        row_at = token * VALUE_TOKEN_STRIDE + head * VALUE_HEAD_STRIDE
        _write_rows(VALUE, V, V_SCALE, row_at, cell_at, live, head, V_SCALE_HEAD_STRIDE, V_SCALE_CHANNEL_STRIDE, D)


@triton.jit
def _round_to_e4m3(x):
    """e4m3 bytes of f32 values, to nearest even, saturating: the same on every device, and in the interpreter."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (127 - 7 << 3)
    # A unit in the last place of 2^14 is e4m3's smallest step, 2^-9.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    magnitude = tl.where(size < 0.015625, subnormal, normal)
    return magnitude | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)


@triton.jit
def _round_to_bf16(x):
    """bf16 of finite f32 values, to nearest even; Triton's interpreter would cut off."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _expand_quarter(
    OUT, RATIO, codes, out_at, real, head, channel, RATIO_HEAD_STRIDE: tl.constexpr, RATIO_CHANNEL_STRIDE: tl.constexpr
):
    """Store a quarter of each row, as e4m3 where the output is bytes."""
    # As f16 bits an e4m3 byte moved up by seven is 2^-8 times its value; the codes are 2^-6 times theirs.
    half = ((codes & 0x80) << 8 | (codes & 0x1F) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    x = half.to(tl.float32) * 16384.0
    if RATIO is not None:
        ratio_at = (head * RATIO_HEAD_STRIDE)[:, None] + (channel * RATIO_CHANNEL_STRIDE)[None, :]
        x *= tl.load(RATIO + ratio_at)
    at = OUT + out_at[:, None] + channel[None, :]
    if OUT.dtype.element_ty == tl.uint8:
        tl.store(at, _round_to_e4m3(x).to(tl.uint8), mask=real[:, None])
    elif OUT.dtype.element_ty == tl.bfloat16:
        tl.store(at, _round_to_bf16(x), mask=real[:, None])
    else:
        tl.store(at, x.to(OUT.dtype.element_ty), mask=real[:, None])


@triton.jit
def _expand_rows(
    CACHE,
    OUT,
    RATIO,
    cell_at,  # (rows,) int64
    out_at,  # (rows,) int64
    known,
    real,
    head,
    RATIO_HEAD_STRIDE: tl.constexpr,
    RATIO_CHANNEL_STRIDE: tl.constexpr,
    D: tl.constexpr,
):
    QUARTER: tl.constexpr = D // 4
    i = tl.arange(0, QUARTER)
    at = CACHE + cell_at[:, None] + i[None, :]
    a = tl.load(at, mask=known[:, None], other=0).to(tl.int32)
    b = tl.load(at + QUARTER, mask=known[:, None], other=0).to(tl.int32)
    c = tl.load(at + 2 * QUARTER, mask=known[:, None], other=0).to(tl.int32)
    fourth = (a >> 2 & 0x18) | (b >> 4 & 0x06) | (c << 1 & 0x80) | (c >> 5 & 0x01)
    H: tl.constexpr = RATIO_HEAD_STRIDE
    C: tl.constexpr = RATIO_CHANNEL_STRIDE
    _expand_quarter(OUT, RATIO, a, out_at, real, head, i, H, C)
    _expand_quarter(OUT, RATIO, b, out_at, real, head, i + QUARTER, H, C)
    _expand_quarter(OUT, RATIO, c, out_at, real, head, i + 2 * QUARTER, H, C)
    _expand_quarter(OUT, RATIO, fourth, out_at, real, head, i + 3 * QUARTER, H, C)


@triton.jit(
    do_not_specialize=["count", "num_pages"],
    do_not_specialize_on_alignment=["SRC_BLOCKS", "K_RATIO", "V_RATIO"],
)
def expand_kernel(
    K,  # paged, bytes
    V,
    SRC_BLOCKS,  # (count,) int32 or int64
    OUT,  # (>= count, HEADS, PAGE, 2 * D) e4m3 bytes
    K_RATIO,  # (HEADS, D) f32, or None
    V_RATIO,
    count,
    num_pages,
    OUT_PAGE_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    OUT_TOKEN_STRIDE: tl.constexpr,
    K_RATIO_HEAD_STRIDE: tl.constexpr,
    K_RATIO_CHANNEL_STRIDE: tl.constexpr,
    V_RATIO_HEAD_STRIDE: tl.constexpr,
    V_RATIO_CHANNEL_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,  # of K and V, bytes
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two
):
    """One program expands ``ROWS`` rows, one of a page, head and token each, of K or of V."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    page = row // (HEADS * PAGE)
    head = row // PAGE % HEADS
    token = row % PAGE
    real = page < count
    block = tl.load(SRC_BLOCKS + page, mask=real, other=-1).to(tl.int64)
    known = (block >= 0) & (block < num_pages)
    block = tl.where(known, block, 0)
    cell_at = block * PAGE_STRIDE + token * TOKEN_STRIDE + head * HEAD_STRIDE
    out_at = page * OUT_PAGE_STRIDE + head * OUT_HEAD_STRIDE + token * OUT_TOKEN_STRIDE
    if tl.program_id(1) == 0:
        _expand_rows(
            K, OUT, K_RATIO, cell_at, out_at, known, real, head, K_RATIO_HEAD_STRIDE, K_RATIO_CHANNEL_STRIDE, D
        )
    else:
        _expand_rows(
            V, OUT, V_RATIO, cell_at, out_at + D, known, real, head, V_RATIO_HEAD_STRIDE, V_RATIO_CHANNEL_STRIDE, D
        )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv: PagedKV,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write K and V of new tokens, divided by their scales, into their slots.

    Args:
        key: (>= tokens, num_kv_heads, head_size) bf16, f16 or f32, unit stride on the last; rows past ``slot_mapping``
            are padding.
        value: as ``key``.
        kv: the cache, rows of `mjolnir.reference.e2m3.row_bytes` bytes.
        slot_mapping: (tokens,) int, page * page_size + row; slots outside the cache, like -1, are skipped.
        k_scale: 1 element, (num_kv_heads,) or (num_kv_heads, head_size).
        v_scale: likewise, in a shape of its own.

    Raises:
        LayoutError: shapes, strides or dtypes do not fit each other.
        ConfigurationError: a scale of another shape.
    """
    check_new_rows(key, value, kv, slot_mapping)
    heads, head_size = key.shape[1:]
    k_scales, v_scales = (channel_scales(scale, heads, head_size) for scale in (k_scale, v_scale))
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    k: torch.Tensor = kv.k
    rows = QUADS * 4 // head_size
    # grid: chunks of rows; K and V
    write_kernel[(triton.cdiv(tokens * heads, rows), 2)](
        key,
        value,
        k,
        kv.v,
        slot_mapping,
        k_scales,
        v_scales,
        tokens,
        k.shape[0] * k.shape[1],
        KEY_TOKEN_STRIDE=key.stride(0),
        KEY_HEAD_STRIDE=key.stride(1),
        VALUE_TOKEN_STRIDE=value.stride(0),
        VALUE_HEAD_STRIDE=value.stride(1),
        K_SCALE_HEAD_STRIDE=k_scales.stride(0),
        K_SCALE_CHANNEL_STRIDE=k_scales.stride(1),
        V_SCALE_HEAD_STRIDE=v_scales.stride(0),
        V_SCALE_CHANNEL_STRIDE=v_scales.stride(1),
        ROWS=rows,
        num_warps=WARPS,
        **_cache_shape(k, head_size),
    )


def expand_pages(
    kv: PagedKV,
    src_blocks: torch.Tensor,
    out: torch.Tensor,
    k_ratio: torch.Tensor | None = None,
    v_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pages of the cache as e4m3 or floats: the codes' values, or these times a ratio, rounded (e4m3: saturated).

    Args:
        kv: the cache.
        src_blocks: (count,) int, pages of the cache; one that it does not have expands to zeros.
        out: (>= count, num_kv_heads, page_size, 2 * head_size) uint8 for e4m3, or bf16, f16 or f32; unit stride on the
            last: K and V side by side.
        k_ratio: (num_kv_heads, head_size) f32, or None for 1.
        v_ratio: likewise.

    Returns:
        ``out[:count]``.

    Raises:
        LayoutError: shapes, strides or dtypes do not fit each other.
        ConfigurationError: ratios of another shape or dtype.
    """
    check_expansion(kv, src_blocks, out, k_ratio, v_ratio)
    count, heads, page_size, head_size = src_blocks.shape[0], out.shape[1], out.shape[2], out.shape[3] // 2
    if count == 0:
        return out[:0]
    k: torch.Tensor = kv.k
    rows = QUADS * 4 // head_size
    k_ratio_strides, v_ratio_strides = ((0, 0) if ratio is None else ratio.stride() for ratio in (k_ratio, v_ratio))
    # grid: chunks of rows; K and V
    expand_kernel[(triton.cdiv(count * heads * page_size, rows), 2)](
        k,
        kv.v,
        src_blocks,
        out,
        k_ratio,
        v_ratio,
        count,
        k.shape[0],
        OUT_PAGE_STRIDE=out.stride(0),
        OUT_HEAD_STRIDE=out.stride(1),
        OUT_TOKEN_STRIDE=out.stride(2),
        K_RATIO_HEAD_STRIDE=k_ratio_strides[0],
        K_RATIO_CHANNEL_STRIDE=k_ratio_strides[1],
        V_RATIO_HEAD_STRIDE=v_ratio_strides[0],
        V_RATIO_CHANNEL_STRIDE=v_ratio_strides[1],
        ROWS=rows,
        num_warps=WARPS,
        **_cache_shape(k, head_size),
    )
    return out[:count]


def _cache_shape(k: torch.Tensor, head_size: int) -> dict[str, int]:
    """What both kernels want to know of the cache at compile time."""
    return {
        "PAGE_STRIDE": k.stride(0),
        "TOKEN_STRIDE": k.stride(1),
        "HEAD_STRIDE": k.stride(2),
        "HEADS": k.shape[2],
        "D": head_size,
        "PAGE": k.shape[1],
    }
