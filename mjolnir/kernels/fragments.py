"""K and V from paged memory straight into matrix-multiply fragments, without shared memory.

Inside a dot product the order of the summed dimension is free, so each lane may load 16 contiguous bytes of a row and
call them whatever channels its fragment wants: for K the query is loaded in the same order, for V the output is put in
order when it is stored. A batch entry of a 3-D dot is one warp, which owns its tokens alone; nothing in the loop waits
for another warp.

Names of dimensions: warp, token, word (four bytes of a row), code (one element).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

# Four e4m3 bytes of a word to four f16; exact.
E4M3_TO_F16 = gl.constexpr(
    "{.reg .b32 a, b; .reg .b16 lo, hi; mov.b32 {lo, hi}, $4; cvt.rn.f16x2.e4m3x2 a, lo; "
    "cvt.rn.f16x2.e4m3x2 b, hi; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b;}"
)
# Three words of a packed e2m3 row, one of each plane, to four words of e4m3 bytes that are the codes' values * 2^-6.
E2M3_TO_E4M3 = gl.constexpr(
    "{.reg .b32 t, u; and.b32 $0, $4, 0x9f9f9f9f; and.b32 $1, $5, 0x9f9f9f9f; and.b32 $2, $6, 0x9f9f9f9f; "
    "shr.u32 t, $4, 2; and.b32 t, t, 0x18181818; shr.u32 u, $5, 4; lop3.b32 t, u, 0x06060606, t, 0xea; "
    "shl.b32 u, $6, 1; lop3.b32 t, u, 0x80808080, t, 0xea; shr.u32 u, $6, 5; lop3.b32 $3, u, 0x01010101, t, 0xea;}"
)

# A warp's 8x8 block of f16, two neighbours of a row in each lane, transposed.
TRANSPOSE_8X8 = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


def _log2(n: int) -> int:
    return n.bit_length() - 1


def _words(
    lane: list[list[int]], registers: list[list[int]], warps: int, shape: list[int]
) -> gl.DistributedLinearLayout:
    warp = [[1 << i, 0, 0] for i in range(_log2(warps))]
    return gl.DistributedLinearLayout(registers, lane, warp, [], shape)


def k_words(head_size: int, warps: int, tokens: int, packed: bool) -> gl.DistributedLinearLayout:
    """Layout of the words of K rows, (warps, tokens, words): four lanes share a token, each with a contiguous part.

    ``packed``: the words of one plane of an e2m3 row.
    """
    token = [[0, 8 << i, 0] for i in range(_log2(tokens // 8))]
    if packed:
        part = head_size // 64  # words of a plane that a lane holds
        word = [[0, 0, 1 << i] for i in range(_log2(part))]
        lanes = [[0, 0, part], [0, 0, 2 * part]]
        shape = [warps, tokens, head_size // 16]
    else:
        word = [[0, 0, 1], [0, 0, 2]] + [[0, 0, 16 << i] for i in range(_log2(head_size // 64))]
        lanes = [[0, 0, 4], [0, 0, 8]]
        shape = [warps, tokens, head_size // 4]
    return _words([*lanes, [0, 1, 0], [0, 2, 0], [0, 4, 0]], word + token, warps, shape)


def v_words(head_size: int, warps: int, tokens: int, packed: bool) -> gl.DistributedLinearLayout:
    """Layout of the words of V rows, (warps, tokens, words): eight lanes share a token."""
    if packed:
        part, blocks = max(1, head_size // 128), 0
        shape = [warps, tokens, head_size // 16]
    else:
        part, blocks = min(16, head_size // 8) // 4, _log2(max(1, head_size // 128))
        shape = [warps, tokens, head_size // 4]
    word = [[0, 0, 1 << i] for i in range(_log2(part))]
    token = [[0, 1, 0]] + [[0, 8 << i, 0] for i in range(_log2(tokens // 8))]
    block = [[0, 0, 8 * part << i] for i in range(blocks)]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, part], [0, 0, 2 * part], [0, 0, 4 * part]]
    return _words(lanes, word + token + block, warps, shape)


def wide_v_words(head_size: int) -> gl.DistributedLinearLayout:
    """Layout of the words of V rows, (4, 16, words), of four warps that share the channels of 64 tokens."""
    part = head_size // 128  # words of a row that a lane holds
    word = [[0, 0, 1 << i] for i in range(_log2(part))]
    token = [[0, 1, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, part], [0, 0, 2 * part], [0, 0, 4 * part]]
    warps = [[0, 0, 8 * part], [0, 0, 16 * part]]
    return gl.DistributedLinearLayout(word + token, lanes, warps, [], [4, 16, head_size // 4])


def wide_product() -> gl.NVMMADistributedLayout:
    """Layout of the results of the products that four warps share, warps along the first dimension."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


def product(warps: int) -> gl.NVMMADistributedLayout:
    """Layout of the results of the 3-D products, one batch entry a warp."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def codes(words):
    """(..., words) of e4m3 bytes to f16 (..., words, 2, 2): byte b of a word is at [b & 1, b >> 1]."""
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        E4M3_TO_F16,
        "=&h,=&h,=&h,=&h,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    return gl.join(gl.join(b0, b1), gl.join(b2, b3))


@gluon.jit
def _unpack(a, b, c):
    """Words of the planes of e2m3 rows to words of e4m3 bytes (..., words, 2, 2): code j is at [j & 1, j >> 1]."""
    e0, e1, e2, e3 = gl.inline_asm_elementwise(
        E2M3_TO_E4M3,
        "=&r,=&r,=&r,=&r,r,r,r",
        [a, b, c],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(gl.join(e0, e1), gl.join(e2, e3))


@gluon.jit
def k_operand(a, b, c, D: gl.constexpr, W: gl.constexpr, T: gl.constexpr, PRODUCT: gl.constexpr, PACKED: gl.constexpr):
    """Words of K rows to the left operand of K Q^T, f16 (warps, tokens, D); see `k_channel` for their order."""
    if PACKED:
        x = gl.reshape(codes(_unpack(a, b, c)), [W, T, 4, D // 64, 2, 2, 2, 2])
        x = gl.permute(x, (0, 1, 3, 5, 4, 7, 2, 6))
    else:
        x = gl.reshape(codes(a), [W, T, D // 64, 4, 4, 2, 2])
        x = gl.permute(x, (0, 1, 2, 4, 6, 3, 5))
    return gl.convert_layout(gl.reshape(x, [W, T, D]), gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def k_channel(k, D: gl.constexpr, PACKED: gl.constexpr):
    """The channel at place ``k`` of the summed dimension of K Q^T; the inverse of the permutations in `k_operand`."""
    byte = (k & 1) | ((k & 8) >> 2)
    if PACKED:
        return ((k >> 4) & 3) * (D // 4) + 4 * (((k >> 1) & 3) * (D // 64) + (k >> 6)) + byte
    return byte | ((k & 6) << 3) | ((k & 0x30) >> 2) | (k & ~63)


@gluon.jit
def v_operand(a, b, c, D: gl.constexpr, W: gl.constexpr, T: gl.constexpr, PRODUCT: gl.constexpr, PACKED: gl.constexpr):
    """Words of V rows to the left operand of V^T P^T, f16 (warps, D, tokens); see `in_channel_order`."""
    if PACKED:
        x = gl.reshape(codes(_unpack(a, b, c)), [W, T, 8, D // 128, 2, 2, 2, 2])
        x = gl.permute(x, (0, 1, 3, 5, 4, 7, 6, 2))
    else:
        J: gl.constexpr = 16 if D >= 128 else D // 8
        x = gl.reshape(codes(a), [W, T, D // (8 * J), 8, J // 4, 2, 2])
        x = gl.permute(x, (0, 1, 2, 4, 6, 5, 3))
    x = gl.permute(gl.reshape(x, [W, T, D]), (0, 2, 1))
    return gl.convert_layout(x, gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def p_operand(p, W: gl.constexpr, T: gl.constexpr, R: gl.constexpr, PRODUCT: gl.constexpr):
    """Weights f16 (warps, tokens, rows) from the layout of a product to the right operand of V^T P^T.

    Each 8x8 block is transposed between the lanes of its warp; read with its two dimensions exchanged, it is the
    same block where the operand wants it.
    """
    t = gl.inline_asm_elementwise(TRANSPOSE_8X8, "=r,r", [p], dtype=gl.float16, is_pure=True, pack=2)
    t = gl.permute(gl.reshape(t, [W, T // 8, 8, R // 8, 8]), (0, 1, 4, 3, 2))
    return gl.convert_layout(gl.reshape(t, [W, T, R]), gl.DotOperandLayout(1, PRODUCT, 2))


@gluon.jit
def in_channel_order(o, D: gl.constexpr, ROWS: gl.constexpr, PACKED: gl.constexpr):
    """Sums of V (D, rows), as `v_operand` ordered them, to (rows, D) by channel."""
    if PACKED:
        o = gl.permute(gl.reshape(o, [D // 128, 4, 4, 8, ROWS]), (4, 1, 3, 0, 2))
    else:
        J: gl.constexpr = 16 if D >= 128 else D // 8
        o = gl.permute(gl.reshape(o, [D // (8 * J), J, 8, ROWS]), (3, 0, 2, 1))
    return gl.reshape(o, [ROWS, D])


@gluon.jit
def dot(a, b, acc):
    """One batched product on the tensor cores."""
    return mma_v2(a, b, acc)
