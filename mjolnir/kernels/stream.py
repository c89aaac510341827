"""T5 for few query rows: every warp attends to its own tokens and rows; one launch a layer.

K and V go from memory to the tensor cores through registers alone. See shares.py for who does what.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mjolnir.kernels.fragments import dot, in_channel_order, k_channel, k_operand, p_operand, v_operand
from mjolnir.kernels.shares import (
    LOG2_E,
    NEVER,
    PACKED_FACTOR,
    find_stretch,
    finish,
    load_pages,
    load_rows,
    per_token,
    per_warp,
)


@gluon.jit
def _weigh(
    s, low, high, at, top, total, num_pages, last_visible, scale,
    T: gl.constexpr, PAGE: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax over scores (warps, T, rows): weights, and what the sums so far shrink by."""
    token = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, PRODUCT)))
    key = per_warp(at, PRODUCT) + gl.expand_dims(gl.expand_dims(token, 0), 2)
    first_inside = ((low >= 0) & (low < num_pages)).to(gl.int32)
    second_inside = ((high >= 0) & (high < num_pages)).to(gl.int32)
    inside = per_token(first_inside, second_inside, T, PAGE, PRODUCT)
    visible = (key <= gl.expand_dims(last_visible, 1)) & (inside != 0)
    # By selection after scaling: garbage in a dead row, and a scale of 0, cannot leak.
    s = gl.where(visible, s * scale, -float("inf"))
    new_top = gl.maximum(top, gl.max(s, 1))
    weights = gl.exp2(s - gl.expand_dims(new_top, 1))
    shrink = gl.exp2(top - new_top)
    # Every lane sums up its own weights; the lanes' sums are added once, at the end.
    total = total * gl.expand_dims(shrink, 1) + weights
    return weights, shrink, new_top, total


@gluon.jit(
    do_not_specialize=["num_seqs", "num_pages", "table_stride", "scale_seq_stride", "scale_head_stride"],
    do_not_specialize_on_alignment=["Q", "OUT", "BLOCK_TABLE", "SEQ_LENS", "ARRIVED", "LSE", "K_SCALE", "V_SCALE"],
)
def stream_kernel(
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
    K_SCALE,  # f32, by the strides below, or (KV_HEADS, D) with CHANNEL_SCALES
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
    PACKED: gl.constexpr,  # e2m3 rows of three planes, else e4m3
    CHANNEL_SCALES: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    W: gl.constexpr,  # warps
    ROW_GROUPS: gl.constexpr,  # warps that share tokens, each with its own query rows
    R: gl.constexpr,  # query rows of a warp: 8 or 16
    T: gl.constexpr,  # tokens of a warp in a step: 16 or 32
    LEAST: gl.constexpr,  # fewest tiles worth a program
    MAX_SEQS: gl.constexpr,  # power of two
    PDL: gl.constexpr,  # launched before the work ahead of it has ended
    K_WORDS: gl.constexpr,
    V_WORDS: gl.constexpr,
    PRODUCT: gl.constexpr,
    MERGE_HERE: gl.constexpr,  # else by a launch of its own
    PIECES: gl.constexpr,  # pieces of a pair that are merged at once
    AT_ONCE: gl.constexpr,  # query rows that are merged at once
    OUTPUT: gl.constexpr,
    MERGED: gl.constexpr,
    SEQS: gl.constexpr,
):
    """One program attends over its stretch of the line of tiles."""
    ROWS: gl.constexpr = ROW_GROUPS * R
    GROUPS: gl.constexpr = W // ROW_GROUPS
    TILE: gl.constexpr = GROUPS * T
    Q_TILES: gl.constexpr = (Q_LEN * GROUP + ROWS - 1) // ROWS
    PAIRS: gl.constexpr = KV_HEADS * Q_TILES
    # Where fewer rows are left out, the registers that it takes cost more: some variants would spill in the loop.
    MOSTLY_FILL: gl.constexpr = 2 * Q_LEN * GROUP <= ROWS * Q_TILES
    QUERY: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    UNIT: gl.constexpr = PACKED_FACTOR if PACKED else 1.0  # of K's and V's codes
    if PDL:
        gdc_wait()
    line, sharing, place, end, seq, ahead = find_stretch(
        SEQ_LENS, num_seqs, gl.num_programs(0), PAIRS, TILE, LEAST, MAX_SEQS, SEQS
    )
    if PDL:
        gdc_launch_dependents()
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, K_WORDS))) // ROW_GROUPS
    warp_q = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY))) % ROW_GROUPS
    k_q = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))
    row_q = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))
    channel_q = gl.expand_dims(gl.expand_dims(k_channel(k_q, D, PACKED), 0), 2)
    warp_s = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(1, PRODUCT))) % ROW_GROUPS
    row_s = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(1, PRODUCT)))
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
        n = gl.expand_dims(gl.expand_dims(warp_q * R, 1), 2) + gl.expand_dims(gl.expand_dims(row_q, 0), 1)
        n += q_tile * ROWS
        token_q = seq.to(gl.int64) * Q_LEN + n // GROUP
        q_at = token_q * Q_TOKEN_STRIDE + (kv_head * GROUP + n % GROUP) * Q_HEAD_STRIDE
        q = gl.load(Q + (q_at + channel_q), mask=(n < Q_LEN * GROUP) & (channel_q >= 0), other=0.0)
        v_scale = UNIT
        if CHANNEL_SCALES:
            factor = gl.load(K_SCALE + kv_head * D + k_channel(k_q, D, PACKED))
        else:
            scale_at = seq * scale_seq_stride + kv_head * scale_head_stride
            k_scale = gl.load(K_SCALE + scale_at)
            v_scale = gl.load(V_SCALE + scale_at) * UNIT

        at = (tile * GROUPS + warp) * T
        low, high = load_pages(TABLE_ROW, at, length, T, PAGE)
        ka, kb, kc = load_rows(
            K_HEAD, low, high, at, length, num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, T, PAGE, PACKED, False, K_WORDS
        )
        va, vb, vc = load_rows(
            V_HEAD, low, high, at, length, num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, T, PAGE, PACKED, True, V_WORDS
        )

        scale = softmax_scale * LOG2_E * UNIT
        if CHANNEL_SCALES:
            q = q.to(gl.float32) * gl.expand_dims(gl.expand_dims(factor, 0), 2)
        else:
            scale = scale * k_scale
        q = q.to(gl.float16)
        row = gl.expand_dims(warp_s * R, 1) + gl.expand_dims(row_s, 0) + q_tile * ROWS
        if CAUSAL and Q_LEN > 1:  # noqa: SIM108  (Triton's ternary wants two scalars)
            last_visible = length - Q_LEN + row // GROUP
        else:
            last_visible = gl.where(row >= 0, length - 1, 0)

        top = gl.full([W, R], NEVER, gl.float32, layout=gl.SliceLayout(1, PRODUCT))
        total = gl.zeros([W, T, R], gl.float32, layout=PRODUCT)
        acc = gl.zeros([W, D, R], gl.float32, layout=PRODUCT)
        zero = gl.zeros([W, T, R], gl.float32, layout=PRODUCT)
        low_next, high_next = load_pages(TABLE_ROW, at + TILE, length, T, PAGE)
        for _ in range(tile + 1, tile_end):
            # The next K and V are loaded into the registers that the product has just read: a load is under way
            # nearly all the time, without a second set of registers.
            s = dot(k_operand(ka, kb, kc, D, W, T, PRODUCT, PACKED), q, zero)
            at_next = at + TILE
            ka, kb, kc = load_rows(
                K_HEAD, low_next, high_next, at_next, length, num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, T, PAGE, PACKED,
                False, K_WORDS,
            )  # fmt: skip
            low_after, high_after = load_pages(TABLE_ROW, at_next + TILE, length, T, PAGE)
            p, shrink, top, total = _weigh(
                s, low, high, at, top, total, num_pages, last_visible, scale, T, PAGE, PRODUCT
            )
            weights = p_operand(p.to(gl.float16), W, T, R, PRODUCT)
            acc = dot(v_operand(va, vb, vc, D, W, T, PRODUCT, PACKED), weights, acc * gl.expand_dims(shrink, 1))
            va, vb, vc = load_rows(
                V_HEAD, low_next, high_next, at_next, length, num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, T, PAGE, PACKED,
                True, V_WORDS,
            )  # fmt: skip
            low, high, low_next, high_next, at = low_next, high_next, low_after, high_after, at_next
        s = dot(k_operand(ka, kb, kc, D, W, T, PRODUCT, PACKED), q, zero)
        p, shrink, top, total = _weigh(s, low, high, at, top, total, num_pages, last_visible, scale, T, PAGE, PRODUCT)
        weights = p_operand(p.to(gl.float16), W, T, R, PRODUCT)
        acc = dot(v_operand(va, vb, vc, D, W, T, PRODUCT, PACKED), weights, acc * gl.expand_dims(shrink, 1))

        # The warps' own results to one: token groups by their maxima, query rows side by side.
        sums = gl.reshape(gl.sum(total, 1), [GROUPS, ROWS])
        tops = gl.reshape(top, [GROUPS, ROWS])
        best = gl.max(tops, 0)
        weight = gl.exp2(tops - gl.expand_dims(best, 0))
        sum_ = gl.sum(sums * weight, 0)
        share = weight / gl.expand_dims(gl.where(sum_ == 0.0, 1.0, sum_), 0)
        share = gl.convert_layout(gl.reshape(share, [W, R]), gl.SliceLayout(1, PRODUCT))
        o = gl.sum(gl.reshape(acc * gl.expand_dims(share, 1), [GROUPS, ROW_GROUPS, D, R]), 0)
        o = gl.reshape(gl.permute(o, (1, 0, 2)), [D, ROWS])
        o = gl.convert_layout(in_channel_order(o, D, ROWS, PACKED), OUTPUT)
        best = gl.convert_layout(best, gl.SliceLayout(1, OUTPUT))
        sum_ = gl.convert_layout(sum_, gl.SliceLayout(1, OUTPUT))
        finish(
            o, best, sum_, OUT, LSE, PART_O, PART_ML, ARRIVED, V_SCALE, v_scale, tile, tile_end, seq_tiles, pair_begin,
            line, sharing, seq, pair, OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE, KV_HEADS, GROUP, Q_LEN, ROWS, Q_TILES, D,
            CHANNEL_SCALES, WRITE_LSE, MERGE_HERE, PIECES, AT_ONCE, OUTPUT, MERGED, MOSTLY_FILL,
        )  # fmt: skip
        place = pair_begin + tile_end
        if place == ahead + seq_tiles * PAIRS:
            seq += 1
            ahead = place
