"""T5 on Hopper: both products by warpgroup instructions, K and V through shared memory, e4m3 only.

K Q^T reads the raw bytes of K: no conversion, no registers. For that the query has to be e4m3 as well, so each of its
rows is multiplied by a power of two and split in two terms, ``high + low``, four significant bits each: together all
eight of a bf16 query. V^T P^T takes V transposed out of shared memory, two bytes at a time, converted to f16 in
registers. See shares.py for who does what.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mjolnir.kernels.shares import LOG2_E, NEVER, find_stretch, finish, meet

# Two tokens of two neighbouring channels, e4m3, to the two tokens of either channel, f16.
CHANNELS_APART = gl.constexpr(
    "{.reg .b32 t; .reg .b16 even, odd; prmt.b32 t, $2, 0, 0x3120; mov.b32 {even, odd}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd;}"
)
# Weights are relative to a maximum that may be out of date by as much, in powers of two: the sums are brought up to
# date only when a score exceeds it by more. f16 ends at 2^16.
HEADROOM = gl.constexpr(8.0)
HEADROOM_BITS = gl.constexpr(0x41000000)  # of 8.0 in f32: positive numbers compare as their bits do


@gluon.jit
def _channels(pairs):
    """int16 (D / 2, tokens) of two e4m3 codes each to f16 (D / 2, tokens) of the even and of the odd channels."""
    return gl.inline_asm_elementwise(
        CHANNELS_APART, "=&r,=&r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def _split(q):
    """f32 (rows, D) to e4m3 terms ``high + low`` of ``q`` times a power of two a row, and that power's inverse."""
    exponent = gl.maximum(gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) >> 23, 27)
    # The row's largest value goes to 128 ... 256; e4m3 ends at 448.
    up = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
    down = ((exponent - 7) << 23).to(gl.float32, bitcast=True)
    q = q * gl.expand_dims(up, 1)
    # Cut off, not converted to e4m3 and back: of that ptxas 12.8 makes code that reads registers which nobody wrote.
    high = (q.to(gl.int32, bitcast=True) & -0x100000).to(gl.float32, bitcast=True)
    return high.to(gl.float8e4nv), (q - high).to(gl.float8e4nv), down


@gluon.jit
def _pages(TABLE_ROW, tile, token, until, TILE: gl.constexpr, PAGE: gl.constexpr):
    """Pages of a tile's tokens, -1 at and past ``until``, where the table is not read; or the one page of them all."""
    if PAGE < TILE:
        # The sums are of what a thread knows once and for all, and what all threads have in common.
        entry = TABLE_ROW + tile * (TILE // PAGE) + token // PAGE
        page = gl.load(entry, mask=token < until - tile * TILE, other=-1)
    else:
        page = gl.load(TABLE_ROW + tile // (PAGE // TILE), mask=tile * TILE < until, other=-1)
    return page


@gluon.jit
def _fetch(
    buffer, HEAD, place, page, tile, token, until, num_pages, PAGE_BYTES: gl.constexpr, TOKEN_BYTES: gl.constexpr,
    TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Begin to copy the rows of a tile's tokens to shared memory; zeros past the end and for pages not of the pool.

    ``place``: (TILE, D) bytes from the head's first row to where the rows are in a page.
    """
    at = page.to(gl.int64) * PAGE_BYTES
    live = page.to(gl.uint32, bitcast=True) < num_pages.to(gl.uint32, bitcast=True)
    # What all threads, or all steps, have in common is added first.
    if PAGE < TILE:
        rows = (HEAD + place) + gl.expand_dims(at, 1)
    else:
        rows = (HEAD + at + tile % (PAGE // TILE) * (TILE * TOKEN_BYTES)) + place
        live = live & (token < until - tile * TILE)
    async_copy.async_copy_global_to_shared(buffer, rows, mask=gl.expand_dims(live, 1))


@gluon.jit
def _step(
    K_HEAD, V_HEAD, place_c, TABLE_ROW, k_buffers, v_buffers, q_high, q_low, p_shared, peaks, tile, until, page_v,
    page_k, page_s, last_visible, scale, top, total, even, odd, num_pages, PAGE_BYTES: gl.constexpr,
    TOKEN_BYTES: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    COPY: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, PAIRS_SHARED: gl.constexpr, PEAKS: gl.constexpr,
    MASKED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Attend to a tile, and begin to copy the one that is ``STAGES`` further on."""
    token_c = gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY))
    token_s = gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
    stage = tile % STAGES
    async_copy.wait_group(STAGES - 1)  # for this tile's K, and behind it a barrier
    fence_async_shared()
    zero = gl.zeros([TILE, ROWS], gl.float32, layout=SCORES)
    # The small terms first: these sums are kept to 13 bits, and every step cuts off some more.
    s = warpgroup_mma(k_buffers.index(stage), q_low.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(k_buffers.index(stage), q_high.permute((1, 0)), s, is_async=True)
    # A page outside of the pool counts as past the end.
    inside = page_s.to(gl.uint32, bitcast=True) < num_pages.to(gl.uint32, bitcast=True)
    bias = gl.where(inside, 0.0, -float("inf"))
    if PAGE < TILE:
        bias = gl.expand_dims(bias, 1)
    s = warpgroup_mma_wait(0, deps=[s])
    s = s * scale + bias
    if MASKED:
        s = gl.where(gl.expand_dims(token_s, 1) <= last_visible - tile * TILE, s, -float("inf"))
    x = s - gl.expand_dims(top, 0)
    p = gl.exp2(x)
    p_shared.permute((1, 0)).store(p.to(gl.float16))
    # Each warp's largest score, as an integer, which is one instruction; the warps exchange them behind the barrier
    # that the weights need anyway.
    bits = gl.max(gl.reshape(x.to(gl.int32, bitcast=True), [TILE // 64, 4, 16 * ROWS]), 0)
    peaks.store(gl.max(bits, 1))
    fence_async_shared()
    async_copy.wait_group(STAGES - 2)  # for its V, and behind it the barrier
    if gl.max(peaks.load(PEAKS), 0) > HEADROOM_BITS:
        new_top = gl.maximum(top, gl.max(s, 0))
        p = gl.exp2(s - gl.expand_dims(new_top, 0))
        p_shared.permute((1, 0)).store(p.to(gl.float16))
        shrink = gl.exp2(top - new_top)
        total = total * gl.expand_dims(shrink, 0)
        shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(0, SUMS)), 0)
        even = even * shrink
        odd = odd * shrink
        top = new_top
        fence_async_shared()
        meet()
    # Every warp is done with this tile's K, and with the V of the tile before.
    _fetch(
        k_buffers.index(stage), K_HEAD, place_c, page_k, tile + STAGES, token_c, until, num_pages, PAGE_BYTES,
        TOKEN_BYTES, TILE, PAGE,
    )  # fmt: skip
    behind = (tile + (STAGES - 1)) % STAGES
    _fetch(
        v_buffers.index(behind), V_HEAD, place_c, page_v, tile + STAGES - 1, token_c, until, num_pages, PAGE_BYTES,
        TOKEN_BYTES, TILE, PAGE,
    )  # fmt: skip
    async_copy.commit_group()
    # For the next step. Pages of K, which are V's a step later, are loaded twice: handing them on would wait for them.
    page_s = _pages(TABLE_ROW, tile + 1, token_s, until, TILE, PAGE)
    page_v = _pages(TABLE_ROW, tile + STAGES, token_c, until, TILE, PAGE)
    page_k = _pages(TABLE_ROW, tile + STAGES + 1, token_c, until, TILE, PAGE)
    # Of a thread's own tokens; the threads' sums are added once, at the end.
    total += gl.convert_layout(gl.sum(gl.reshape(p, [TILE // 64, 64, ROWS]), 0), SCORES)
    pairs = v_buffers.index(stage)._reinterpret(gl.int16, [TILE, D // 2], PAIRS_SHARED)
    v_even, v_odd = _channels(pairs.permute((1, 0)).load(gl.DotOperandLayout(0, SUMS, 2)))
    even = warpgroup_mma(v_even, p_shared.permute((1, 0)), even, is_async=True)
    odd = warpgroup_mma(v_odd, p_shared.permute((1, 0)), odd, is_async=True)
    even, odd = warpgroup_mma_wait(0, deps=[even, odd])
    return page_v, page_k, page_s, top, total, even, odd


@gluon.jit(
    do_not_specialize=["num_seqs", "num_pages", "table_stride", "scale_seq_stride", "scale_head_stride"],
    do_not_specialize_on_alignment=["Q", "OUT", "BLOCK_TABLE", "SEQ_LENS", "ARRIVED", "LSE", "K_SCALE", "V_SCALE"],
)
def wgmma_kernel(
    Q,  # (num_seqs * Q_LEN, heads, D) model dtype
    K,  # e4m3; strides below are in words of four bytes
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
    TILE: gl.constexpr,  # tokens of a step: 64 or 128
    STAGES: gl.constexpr,  # tiles that are kept or under way
    LEAST: gl.constexpr,  # fewest tiles worth a program
    MAX_SEQS: gl.constexpr,  # power of two
    PDL: gl.constexpr,  # launched before the work ahead of it has ended
    COPY: gl.constexpr,
    SCORES: gl.constexpr,  # of K Q^T, (TILE, ROWS)
    SUMS: gl.constexpr,  # of V^T P^T, twice (D / 2, ROWS): even and odd channels
    BYTES_SHARED: gl.constexpr,
    PAIRS_SHARED: gl.constexpr,
    P_SHARED: gl.constexpr,
    PEAKS_SHARED: gl.constexpr,
    PEAKS: gl.constexpr,  # (4,): every thread holds all of them
    MERGE_HERE: gl.constexpr,  # else by a launch of its own
    PIECES: gl.constexpr,  # pieces of a pair that are merged at once
    AT_ONCE: gl.constexpr,  # query rows that are merged at once
    OUTPUT: gl.constexpr,
    MERGED: gl.constexpr,
    SEQS: gl.constexpr,
):
    """One program attends over its stretch of the line of tiles."""
    Q_TILES: gl.constexpr = (Q_LEN * GROUP + ROWS - 1) // ROWS
    PAIRS: gl.constexpr = KV_HEADS * Q_TILES
    PAGE_BYTES: gl.constexpr = 4 * PAGE_STRIDE
    TOKEN_BYTES: gl.constexpr = 4 * TOKEN_STRIDE
    if PDL:
        gdc_wait()
    line, sharing, place, end, seq, ahead = find_stretch(
        SEQ_LENS, num_seqs, gl.num_programs(0), PAIRS, TILE, LEAST, MAX_SEQS, SEQS
    )
    if PDL:
        gdc_launch_dependents()
    token_c = gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY))
    token_s = gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
    place_c = gl.expand_dims(token_c % PAGE * TOKEN_BYTES, 1)
    place_c += gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, COPY)), 0)
    row_s = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    # As tokens are copied, 16 elements of a row a thread: few steps to a row's maximum.
    row_q = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY)), 1)
    channel_q = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, COPY)), 0)
    k_buffers = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, D], BYTES_SHARED)
    v_buffers = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, D], BYTES_SHARED)
    q_high = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, D], BYTES_SHARED)
    q_low = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, D], BYTES_SHARED)
    p_shared = gl.allocate_shared_memory(gl.float16, [ROWS, TILE], P_SHARED)
    peaks = gl.allocate_shared_memory(gl.int32, [4], PEAKS_SHARED)
    while place < end:
        length = gl.load(SEQ_LENS + seq)
        seq_tiles = gl.maximum(gl.cdiv(length, TILE), 1)
        pair = (place - ahead) // seq_tiles
        pair_begin = ahead + pair * seq_tiles
        kv_head = pair // Q_TILES
        q_tile = pair % Q_TILES
        tile = place - pair_begin
        tile_end = gl.minimum(seq_tiles, end - pair_begin)
        K_HEAD = K + kv_head.to(gl.int64) * (4 * HEAD_STRIDE)
        V_HEAD = V + kv_head.to(gl.int64) * (4 * HEAD_STRIDE)
        TABLE_ROW = BLOCK_TABLE + seq.to(gl.int64) * table_stride

        # The query before anything that waits for page numbers.
        n = row_q + q_tile * ROWS
        q_at = (seq.to(gl.int64) * Q_LEN + n // GROUP) * Q_TOKEN_STRIDE + (kv_head * GROUP + n % GROUP) * Q_HEAD_STRIDE
        q = gl.load(Q + (q_at + channel_q), mask=(n < Q_LEN * GROUP) & (channel_q >= 0), other=0.0)
        scale_at = seq * scale_seq_stride + kv_head * scale_head_stride
        k_scale = gl.load(K_SCALE + scale_at)
        v_scale = gl.load(V_SCALE + scale_at)

        # A stretch may end ahead of its sequence: what lies behind it is not loaded.
        until = gl.minimum(length, tile_end * TILE)
        page_k = _pages(TABLE_ROW, tile, token_c, until, TILE, PAGE)
        page_v = page_k
        page_s = _pages(TABLE_ROW, tile, token_s, until, TILE, PAGE)
        for ahead_by in gl.static_range(STAGES):
            stage = (tile + ahead_by) % STAGES
            _fetch(
                k_buffers.index(stage), K_HEAD, place_c, page_k, tile + ahead_by, token_c, until, num_pages, PAGE_BYTES,
                TOKEN_BYTES, TILE, PAGE,
            )  # fmt: skip
            if ahead_by < STAGES - 1:
                _fetch(
                    v_buffers.index(stage), V_HEAD, place_c, page_k, tile + ahead_by, token_c, until, num_pages,
                    PAGE_BYTES, TOKEN_BYTES, TILE, PAGE,
                )  # fmt: skip
            async_copy.commit_group()
            page_v = page_k
            page_k = _pages(TABLE_ROW, tile + ahead_by + 1, token_c, until, TILE, PAGE)

        high, low, down = _split(q.to(gl.float32))
        q_high.store(high)
        q_low.store(low)
        fence_async_shared()
        scale = softmax_scale * LOG2_E * k_scale * down
        scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, SCORES)), 0)
        row = row_s + q_tile * ROWS
        if CAUSAL and Q_LEN > 1:  # noqa: SIM108  (Triton's ternary wants two scalars)
            last_visible = length - Q_LEN + row // GROUP
        else:
            last_visible = gl.where(row >= 0, length - 1, 0)
        last_visible = gl.expand_dims(last_visible, 0)
        first_hidden = length
        if CAUSAL:
            first_hidden = length - Q_LEN + 1

        top = gl.full([ROWS], NEVER, gl.float32, layout=gl.SliceLayout(0, SCORES))
        total = gl.zeros([64, ROWS], gl.float32, layout=SCORES)
        even = gl.zeros([D // 2, ROWS], gl.float32, layout=SUMS)
        odd = gl.zeros([D // 2, ROWS], gl.float32, layout=SUMS)
        # All rows see all of the tiles up to here.
        border = gl.minimum(gl.maximum(first_hidden // TILE, tile), tile_end)
        for step in range(tile, border):
            page_v, page_k, page_s, top, total, even, odd = _step(
                K_HEAD, V_HEAD, place_c, TABLE_ROW, k_buffers, v_buffers, q_high, q_low, p_shared, peaks, step, until,
                page_v, page_k, page_s, last_visible, scale, top, total, even, odd, num_pages, PAGE_BYTES, TOKEN_BYTES,
                D, PAGE, TILE, STAGES, COPY, SCORES, SUMS, PAIRS_SHARED, PEAKS, False, ROWS,
            )  # fmt: skip
        for step in range(border, tile_end):
            page_v, page_k, page_s, top, total, even, odd = _step(
                K_HEAD, V_HEAD, place_c, TABLE_ROW, k_buffers, v_buffers, q_high, q_low, p_shared, peaks, step, until,
                page_v, page_k, page_s, last_visible, scale, top, total, even, odd, num_pages, PAGE_BYTES, TOKEN_BYTES,
                D, PAGE, TILE, STAGES, COPY, SCORES, SUMS, PAIRS_SHARED, PEAKS, True, ROWS,
            )  # fmt: skip
        async_copy.wait_group(0)

        sums = gl.sum(total, 0)
        share = gl.convert_layout(1.0 / gl.where(sums == 0.0, 1.0, sums), gl.SliceLayout(0, SUMS))
        share = gl.expand_dims(share, 0)
        # As f16, the precision of pieces: half as much to bring in order.
        o = gl.permute(gl.join((even * share).to(gl.float16), (odd * share).to(gl.float16)), (1, 0, 2))
        o = gl.convert_layout(gl.reshape(o, [ROWS, D]), OUTPUT).to(gl.float32)
        best = gl.convert_layout(top, gl.SliceLayout(1, OUTPUT))
        sums = gl.convert_layout(sums, gl.SliceLayout(1, OUTPUT))
        finish(
            o, best, sums, OUT, LSE, PART_O, PART_ML, ARRIVED, V_SCALE, v_scale, tile, tile_end, seq_tiles, pair_begin,
            line, sharing, seq, pair, OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE, KV_HEADS, GROUP, Q_LEN, ROWS, Q_TILES, D,
            False, WRITE_LSE, MERGE_HERE, PIECES, AT_ONCE, OUTPUT, MERGED, True,
        )  # fmt: skip
        place = pair_begin + tile_end
        if place == ahead + seq_tiles * PAIRS:
            seq += 1
            ahead = place
