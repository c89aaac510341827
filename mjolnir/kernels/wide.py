"""T5 for many query rows: the warps of a program share its tokens for K Q^T and its channels for V^T P^T.

So every byte of the cache is loaded and converted once, whatever the number of rows, and the sums of the output are
spread over all warps. The price is an exchange of weights through shared memory in every step. K and V go from memory
to the tensor cores through registers; the query waits in shared memory. e4m3 only. See shares.py for who does what.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mjolnir.kernels.fragments import codes, dot, k_channel
from mjolnir.kernels.shares import LOG2_E, NEVER, find_stretch, finish, load_pages, load_rows


@gluon.jit
def _k_operand(words, D: gl.constexpr, TILE: gl.constexpr, PRODUCT: gl.constexpr):
    """Words (4, 16, D/4) of K rows to the left operand of K Q^T, f16 (TILE, D); see `k_channel` for their order."""
    x = gl.reshape(codes(words), [TILE, D // 64, 4, 4, 2, 2])
    x = gl.permute(x, (0, 1, 3, 5, 2, 4))
    return gl.convert_layout(gl.reshape(x, [TILE, D]), gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def _v_operand(words, D: gl.constexpr, TILE: gl.constexpr, PRODUCT: gl.constexpr):
    """Words (4, 16, D/4) of V rows to the left operand of V^T P^T, f16 (D, TILE); see `_in_channel_order`."""
    x = gl.reshape(codes(words), [TILE, 4, 8, D // 128, 2, 2])
    x = gl.permute(x, (3, 5, 1, 4, 2, 0))
    return gl.convert_layout(gl.reshape(x, [D, TILE]), gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def _in_channel_order(o, D: gl.constexpr, ROWS: gl.constexpr):
    """Sums of V (D, ROWS), as `_v_operand` ordered them, to (ROWS, D) by channel."""
    o = gl.permute(gl.reshape(o, [D // 128, 2, 4, 2, 8, ROWS]), (5, 2, 4, 0, 1, 3))
    return gl.reshape(o, [ROWS, D])


@gluon.jit(
    do_not_specialize=["num_seqs", "num_pages", "table_stride", "scale_seq_stride", "scale_head_stride"],
    do_not_specialize_on_alignment=["Q", "OUT", "BLOCK_TABLE", "SEQ_LENS", "ARRIVED", "LSE", "K_SCALE", "V_SCALE"],
)
def wide_kernel(
    Q,  # (num_seqs * Q_LEN, heads, D) model dtype
    K,  # words of K rows, int32; strides below are in words
    V,
    OUT,  # (num_seqs * Q_LEN, heads, D) model dtype
    BLOCK_TABLE,  # (num_seqs, max_blocks) int32
    SEQ_LENS,  # (num_seqs,) int32, 0 for padding
    PART_O,  # (2 * programs, ROWS, D) f16, workspace: each piece's own output
    PART_ML,  # (2 * programs, 2, ROWS) f32, workspace: maximum and sum of weights
    ARRIVED,  # (num_seqs * pairs,) int32, workspace: pieces done; zero before and after a launch
    LSE,  # (num_seqs, KV_HEADS, Q_LEN * GROUP) f32, natural log; only with WRITE_LSE
    K_SCALE,  # f32, by the strides below
    V_SCALE,
    num_seqs,
    num_pages,
    softmax_scale,
    table_stride,
    scale_seq_stride,
    scale_head_stride,
    Q_TOKEN_STRIDE: gl.constexpr,
    Q_HEAD_STRIDE: gl.constexpr,
    OUT_TOKEN_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    HEAD_STRIDE: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a KV head
    Q_LEN: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    ROWS: gl.constexpr,  # query rows of a program: 8, 16, 32 or 64
    LEAST: gl.constexpr,  # fewest tiles worth a program
    MAX_SEQS: gl.constexpr,  # power of two
    PDL: gl.constexpr,  # launched before the work ahead of it has ended
    K_WORDS: gl.constexpr,
    V_WORDS: gl.constexpr,
    PRODUCT: gl.constexpr,  # of both products: (TILE, ROWS) and (D, ROWS), warps along the first
    Q_SHARED: gl.constexpr,
    P_SHARED: gl.constexpr,
    MERGE_HERE: gl.constexpr,  # else by a launch of its own
    PIECES: gl.constexpr,  # pieces of a pair that are merged at once
    AT_ONCE: gl.constexpr,  # query rows that are merged at once
    OUTPUT: gl.constexpr,
    MERGED: gl.constexpr,
    SEQS: gl.constexpr,
):
    """One program attends over its stretch of the line of tiles."""
    TILE: gl.constexpr = 64
    Q_TILES: gl.constexpr = (Q_LEN * GROUP + ROWS - 1) // ROWS
    PAIRS: gl.constexpr = KV_HEADS * Q_TILES
    # Where fewer rows are left out, the registers that it takes cost more: some variants would spill in the loop.
    MOSTLY_FILL: gl.constexpr = 2 * Q_LEN * GROUP <= ROWS * Q_TILES
    if PDL:
        gdc_wait()
    line, sharing, place, end, seq, ahead = find_stretch(
        SEQ_LENS, num_seqs, gl.num_programs(0), PAIRS, TILE, LEAST, MAX_SEQS, SEQS
    )
    if PDL:
        gdc_launch_dependents()
    group_k = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, K_WORDS)))
    group_v = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, V_WORDS)))
    token_s = gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCT))
    row_q = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUTPUT)), 1)
    channel_q = gl.expand_dims(k_channel(gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT)), D, False), 0)
    row_s = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PRODUCT))
    q_shared = gl.allocate_shared_memory(gl.float16, [ROWS, D], Q_SHARED)
    p_shared = gl.allocate_shared_memory(gl.float16, [TILE, ROWS], P_SHARED)
    while place < end:
        length = gl.load(SEQ_LENS + seq)
        seq_tiles = gl.maximum(gl.cdiv(length, TILE), 1)
        pair = (place - ahead) // seq_tiles
        pair_begin = ahead + pair * seq_tiles
        kv_head = pair // Q_TILES
        q_tile = pair % Q_TILES
        tile = place - pair_begin
        tile_end = gl.minimum(seq_tiles, end - pair_begin)
        K_HEAD = K + kv_head.to(gl.int64) * HEAD_STRIDE
        V_HEAD = V + kv_head.to(gl.int64) * HEAD_STRIDE
        TABLE_ROW = BLOCK_TABLE + seq.to(gl.int64) * table_stride

        # The query before anything that waits for page numbers.
        n = row_q + q_tile * ROWS
        q_at = (seq.to(gl.int64) * Q_LEN + n // GROUP) * Q_TOKEN_STRIDE + (kv_head * GROUP + n % GROUP) * Q_HEAD_STRIDE
        q = gl.load(Q + (q_at + channel_q), mask=(n < Q_LEN * GROUP) & (channel_q >= 0), other=0.0)
        scale_at = seq * scale_seq_stride + kv_head * scale_head_stride
        scale = softmax_scale * LOG2_E * gl.load(K_SCALE + scale_at)
        v_scale = gl.load(V_SCALE + scale_at)

        at_k = tile * TILE + group_k * 16
        at_v = tile * TILE + group_v * 16
        key = tile * TILE + token_s
        page_k, _ = load_pages(TABLE_ROW, at_k, length, 16, PAGE)
        page_v, _ = load_pages(TABLE_ROW, at_v, length, 16, PAGE)
        page_s, _ = load_pages(TABLE_ROW, key, length, 1, PAGE)
        k, _, _ = load_rows(
            K_HEAD,
            page_k,
            page_k,
            at_k,
            length,
            num_pages,
            PAGE_STRIDE,
            TOKEN_STRIDE,
            D,
            16,
            PAGE,
            False,
            False,
            K_WORDS,
        )
        v, _, _ = load_rows(
            V_HEAD,
            page_v,
            page_v,
            at_v,
            length,
            num_pages,
            PAGE_STRIDE,
            TOKEN_STRIDE,
            D,
            16,
            PAGE,
            False,
            True,
            V_WORDS,
        )

        q_shared.store(q.to(gl.float16))
        row = row_s + q_tile * ROWS
        if CAUSAL and Q_LEN > 1:  # noqa: SIM108  (Triton's ternary wants two scalars)
            last_visible = length - Q_LEN + row // GROUP
        else:
            last_visible = gl.where(row >= 0, length - 1, 0)
        last_visible = gl.expand_dims(last_visible, 0)

        top = gl.full([ROWS], NEVER, gl.float32, layout=gl.SliceLayout(0, PRODUCT))
        total = gl.zeros([TILE, ROWS], gl.float32, layout=PRODUCT)
        acc = gl.zeros([D, ROWS], gl.float32, layout=PRODUCT)
        zero = gl.zeros([TILE, ROWS], gl.float32, layout=PRODUCT)
        page_k, _ = load_pages(TABLE_ROW, at_k + TILE, length, 16, PAGE)
        page_v, _ = load_pages(TABLE_ROW, at_v + TILE, length, 16, PAGE)
        # A stretch may end ahead of its sequence: what lies behind it is not loaded.
        until = gl.minimum(length, tile_end * TILE)
        for _ in range(tile, tile_end):
            q_operand = q_shared.permute((1, 0)).load(gl.DotOperandLayout(1, PRODUCT, 2))
            s = dot(_k_operand(k, D, TILE, PRODUCT), q_operand, zero)
            # Into the registers that the product has just read; behind the last tile nothing is live.
            at_k += TILE
            at_v += TILE
            k, _, _ = load_rows(
                K_HEAD, page_k, page_k, at_k, until, num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, 16, PAGE, False, False,
                K_WORDS,
            )  # fmt: skip
            page_k, _ = load_pages(TABLE_ROW, at_k + TILE, until, 16, PAGE)
            inside = (page_s >= 0) & (page_s < num_pages)
            page_s, _ = load_pages(TABLE_ROW, key + TILE, length, 1, PAGE)
            visible = (gl.expand_dims(key, 1) <= last_visible) & gl.expand_dims(inside, 1)
            s = gl.where(visible, s * scale, -float("inf"))
            new_top = gl.maximum(top, gl.max(s, 0))
            p = gl.exp2(s - gl.expand_dims(new_top, 0))
            shrink = gl.expand_dims(gl.exp2(top - new_top), 0)
            total = total * shrink + p
            top = new_top
            p_shared.store(p.to(gl.float16))
            weights = p_shared.load(gl.DotOperandLayout(1, PRODUCT, 2))
            acc = dot(_v_operand(v, D, TILE, PRODUCT), weights, acc * shrink)
            v, _, _ = load_rows(
                V_HEAD, page_v, page_v, at_v, until, num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, 16, PAGE, False, True,
                V_WORDS,
            )  # fmt: skip
            page_v, _ = load_pages(TABLE_ROW, at_v + TILE, until, 16, PAGE)
            key += TILE

        sums = gl.sum(total, 0)
        o = acc / gl.expand_dims(gl.where(sums == 0.0, 1.0, sums), 0)
        o = gl.convert_layout(_in_channel_order(o, D, ROWS), OUTPUT)
        best = gl.convert_layout(top, gl.SliceLayout(1, OUTPUT))
        sums = gl.convert_layout(sums, gl.SliceLayout(1, OUTPUT))
        finish(
            o, best, sums, OUT, LSE, PART_O, PART_ML, ARRIVED, V_SCALE, v_scale, tile, tile_end, seq_tiles, pair_begin,
            line, sharing, seq, pair, OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE, KV_HEADS, GROUP, Q_LEN, ROWS, Q_TILES, D,
            False, WRITE_LSE, MERGE_HERE, PIECES, AT_ONCE, OUTPUT, MERGED, MOSTLY_FILL,
        )  # fmt: skip
        place = pair_begin + tile_end
        if place == ahead + seq_tiles * PAIRS:
            seq += 1
            ahead = place
