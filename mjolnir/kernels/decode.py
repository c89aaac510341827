"""T5 itself: split-KV decode attention over paged e4m3 K and V, one wave of persistent programs."""

import triton
import triton.language as tl

from mjolnir.kernels.verbs import natural_lse, nonzero


@triton.jit
def _visit_tiles(
    q,  # (ROWS, D) f16, scaled so that scores are in log2 units but for K's descale
    acc,  # (ROWS, D) f32
    top,  # (ROWS,) f32, running maximum
    total,  # (ROWS,) f32, running sum of weights
    K_HEAD,  # K of this KV head
    V_HEAD,
    TABLE_ROW,  # block table of this sequence
    tile_begin,
    tile_end,
    length,
    last_visible,  # (ROWS,) int32, last key each row may see
    k_scale,
    num_pages,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over tiles; ``MASKED`` only where a key may be past the end or hidden from a row."""
    channel = tl.arange(0, D)
    token = tl.arange(0, TILE)
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        key = tile * TILE + token
        if MASKED:
            # The table is never read past the end of the sequence: what stands there may be anything.
            page = tl.load(TABLE_ROW + key // PAGE, mask=key < length, other=0).to(tl.int64)
            live = (key < length) & (page >= 0) & (page < num_pages)
            row = page * PAGE_STRIDE + (key % PAGE) * TOKEN_STRIDE
            where = row[:, None] + channel[None, :]
            k = tl.load(K_HEAD + where, mask=live[:, None], other=0.0, eviction_policy="evict_first")
            # By selection: a stale row may hold a NaN, and 0 * NaN is NaN.
            v = tl.load(V_HEAD + where, mask=live[:, None], other=0.0, eviction_policy="evict_first")
        else:
            if PAGE >= TILE:
                page = tl.load(TABLE_ROW + tile * TILE // PAGE).to(tl.int64)
                row = page * PAGE_STRIDE + (tile * TILE % PAGE + token) * TOKEN_STRIDE
            else:
                page = tl.load(TABLE_ROW + key // PAGE).to(tl.int64)
                row = page * PAGE_STRIDE + (key % PAGE) * TOKEN_STRIDE
            where = row[:, None] + channel[None, :]
            k = tl.load(K_HEAD + where, eviction_policy="evict_first")
            v = tl.load(V_HEAD + where, eviction_policy="evict_first")
        scores = tl.dot(q, tl.trans(k.to(tl.float16))) * k_scale
        if MASKED:
            scores = tl.where((key[None, :] <= last_visible[:, None]) & live[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Relative to 0 where no key is visible yet: every weight is then exp2(-inf) = 0.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.float16), v.to(tl.float16), acc * shrink[:, None])
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=["num_pages", "table_stride", "scale_seq_stride", "scale_head_stride"],
    do_not_specialize_on_alignment=["Q", "OUT", "BLOCK_TABLE", "SEQ_LENS", "LSE", "K_SCALE", "V_SCALE"],
)
def decode_kernel(
    Q,  # (num_seqs * Q_LEN, heads, D) model dtype
    K,  # paged, e4m3; strides below
    V,
    OUT,  # (num_seqs * Q_LEN, heads, D) model dtype
    BLOCK_TABLE,  # (num_seqs, max_blocks) int32
    SEQ_LENS,  # (num_seqs,) int32
    WORK,  # (programs, 4) int32, plan_kernel
    PART_O,  # (2 * programs, ROWS, D) f32, workspace
    PART_ML,  # (2 * programs, 2, ROWS) f32, workspace: maximum and sum
    LSE,  # (num_seqs, KV_HEADS, Q_LEN * GROUP) f32, natural log; only with WRITE_LSE
    K_SCALE,
    V_SCALE,
    num_pages,
    softmax_scale,
    table_stride,
    scale_seq_stride,
    scale_head_stride,
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_TOKEN_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    Q_LEN: tl.constexpr,
    Q_TILES: tl.constexpr,
    ROWS: tl.constexpr,  # query rows of a tile, a power of two from 16
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program attends over its stretch of the line of tiles; see plan.py."""
    PAIRS: tl.constexpr = KV_HEADS * Q_TILES
    program = tl.program_id(0)
    seq = tl.load(WORK + program * 4)
    pair = tl.load(WORK + program * 4 + 1)
    tile_begin = tl.load(WORK + program * 4 + 2)
    left = tl.load(WORK + program * 4 + 3)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    while left > 0:
        length = tl.load(SEQ_LENS + seq)
        seq_tiles = tl.maximum((length + TILE - 1) // TILE, 1)
        tile_end = tl.minimum(seq_tiles, tile_begin + left)
        kv_head = pair // Q_TILES

        n = (pair % Q_TILES) * ROWS + row
        real = n < Q_LEN * GROUP
        q_token = seq.to(tl.int64) * Q_LEN + n // GROUP
        head = kv_head * GROUP + n % GROUP
        q_at = q_token * Q_TOKEN_STRIDE + head * Q_HEAD_STRIDE
        q = tl.load(Q + q_at[:, None] + channel[None, :], mask=real[:, None], other=0.0)
        q = (q.to(tl.float32) * (softmax_scale * 1.4426950408889634)).to(tl.float16)
        k_scale = tl.load(K_SCALE + seq * scale_seq_stride + kv_head * scale_head_stride)
        v_scale = tl.load(V_SCALE + seq * scale_seq_stride + kv_head * scale_head_stride)
        last_visible = tl.where(n < 0, 0, length - 1)
        if CAUSAL and Q_LEN > 1:
            last_visible = length - Q_LEN + n // GROUP
        # Tiles of which every row sees every key need no mask.
        clear = length - Q_LEN + 1 if CAUSAL else length
        clear_end = tl.minimum(tile_end, tl.maximum(tile_begin, clear // TILE))

        acc = tl.zeros([ROWS, D], tl.float32)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        K_HEAD = K + kv_head.to(tl.int64) * HEAD_STRIDE
        V_HEAD = V + kv_head.to(tl.int64) * HEAD_STRIDE
        TABLE_ROW = BLOCK_TABLE + seq.to(tl.int64) * table_stride
        acc, top, total = _visit_tiles(
            q, acc, top, total, K_HEAD, V_HEAD, TABLE_ROW, tile_begin, clear_end, length, last_visible, k_scale,
            num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, PAGE, TILE, False, STAGES,
        )  # fmt: skip
        acc, top, total = _visit_tiles(
            q, acc, top, total, K_HEAD, V_HEAD, TABLE_ROW, clear_end, tile_end, length, last_visible, k_scale,
            num_pages, PAGE_STRIDE, TOKEN_STRIDE, D, PAGE, TILE, True, 1,
        )  # fmt: skip

        if (tile_begin == 0) & (tile_end == seq_tiles):
            o = acc * v_scale / nonzero(total)[:, None]
            out_at = q_token * OUT_TOKEN_STRIDE + head * OUT_HEAD_STRIDE
            tl.store(OUT + out_at[:, None] + channel[None, :], o.to(OUT.dtype.element_ty), mask=real[:, None])
            if WRITE_LSE:
                lse_at = (seq * KV_HEADS + kv_head) * (Q_LEN * GROUP) + n
                tl.store(LSE + lse_at, natural_lse(top, total), mask=real)
        else:
            # A stretch has at most two unfinished ends: where it enters a pair, and where it leaves one.
            slot = 2 * program.to(tl.int64) + tl.where(tile_begin == 0, 1, 0)
            o_at = (slot * ROWS + row) * D
            tl.store(PART_O + o_at[:, None] + channel[None, :], acc * v_scale)
            tl.store(PART_ML + slot * (2 * ROWS) + row, top)
            tl.store(PART_ML + slot * (2 * ROWS) + ROWS + row, total)
        left -= tile_end - tile_begin
        tile_begin = tile_begin * 0  # Triton wants the type of a carried variable to stay
        pair += 1
        seq += pair // PAIRS
        pair %= PAIRS
