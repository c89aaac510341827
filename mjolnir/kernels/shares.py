"""What the streaming kernels share: their stretch of the work, token rows from pages, output and merge.

All tiles of all (sequence, KV head, query tile) pairs form one line, sequence by sequence. The programs of a launch
take equal stretches of it, at most one tile longer or shorter than another, however skewed the lengths are. A program
finds its stretch from the live sequence lengths alone: there is no plan that could be stale, so a captured graph or a
fused draft step always works on the lengths of its replay.

A program that attends to a pair alone writes its output. Of the programs that share a pair, the last to arrive merges
all pieces by their log-sum-exp, in the order of the line, so the result does not depend on who was last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

meet = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NEVER = gl.constexpr(-1e30)  # a maximum below every score; finite, so that no difference is NaN
PACKED_FACTOR = gl.constexpr(64.0)  # e2m3 codes are read as e4m3, which makes them value * 2^-6


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _stretch_begin(program, tiles, programs):
    """Where a program's stretch of the line begins; that of the next program is where it ends."""
    return program * (tiles // programs) + gl.minimum(program, tiles % programs)


@gluon.jit
def _program_of(tile, tiles, programs):
    """The program whose stretch holds a tile of the line: the inverse of `_stretch_begin`."""
    short = tiles // programs
    border = (tiles % programs) * (short + 1)
    return gl.where(tile < border, tile // (short + 1), tiles % programs + (tile - border) // gl.maximum(short, 1))


@gluon.jit
def sharing_programs(tiles, pairs, programs, LEAST: gl.constexpr):
    """How many programs share the line: all, but for stretches under ``LEAST`` tiles.

    Where leaving out less than one program in sixteen makes their number a multiple of that of the pairs, they are left
    out: pairs of equal length are then cut evenly, or not at all.
    """
    sharing = gl.minimum(gl.maximum(tiles // LEAST, 1), programs)
    odd = sharing % pairs
    return gl.where(odd * 16 < sharing, sharing - odd, sharing)


@gluon.jit
def find_stretch(
    SEQ_LENS, num_seqs, programs, PAIRS: gl.constexpr, TILE: gl.constexpr, LEAST: gl.constexpr,
    MAX_SEQS: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """This program's stretch: (tiles of the line, programs that share it, begin, end, sequence, tiles ahead of it)."""
    seq = gl.arange(0, MAX_SEQS, layout=SEQS)
    live = seq < num_seqs
    length = gl.load(SEQ_LENS + seq, mask=live, other=0)
    # A sequence without tokens still owns a tile: somebody must write its zeros.
    tiles = gl.where(live, gl.maximum(gl.cdiv(length, TILE), 1), 0) * PAIRS
    ends = gl.associative_scan(tiles, 0, _add)
    total = gl.sum(tiles, 0)
    sharing = sharing_programs(total, num_seqs * PAIRS, programs, LEAST)
    program = gl.program_id(0)
    begin = gl.minimum(_stretch_begin(program, total, sharing), total)
    end = gl.minimum(_stretch_begin(program + 1, total, sharing), total)
    passed = (ends <= begin) & live
    first = gl.sum(passed.to(gl.int32), 0)
    ahead = gl.sum(gl.where(passed, tiles, 0), 0)
    return total, sharing, begin, end, first, ahead


@gluon.jit
def per_warp(x, LAYOUT: gl.constexpr):
    """(warps,) to (warps, 1, 1) in another layout; every lane of a warp holds the value, so nothing moves."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


@gluon.jit
def per_token(low, high, T: gl.constexpr, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """(warps, T or 1, 1): a warp's value for its first page and, where its tokens need two pages, for the second."""
    x = per_warp(low, LAYOUT)
    if PAGE < T:
        token = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        token = gl.expand_dims(gl.expand_dims(token, 0), 2)
        x = gl.where(token < PAGE, x, per_warp(high, LAYOUT))
    return x


@gluon.jit
def load_pages(TABLE_ROW, at, length, T: gl.constexpr, PAGE: gl.constexpr):
    """Pages of the tokens from ``at`` (warps,); the table is never read at or past the end of the sequence."""
    low = gl.load(TABLE_ROW + at // PAGE, mask=at < length, other=0)
    high = low
    if PAGE < T:
        high = gl.load(TABLE_ROW + at // PAGE + 1, mask=at + PAGE < length, other=0)
    return low, high


@gluon.jit
def _load_words(
    BASE, row, at, limit, PLANE: gl.constexpr, WORDS: gl.constexpr, TOKEN_STRIDE: gl.constexpr, T: gl.constexpr,
    ZERO: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Words (warps, T, WORDS) of token rows; those past the end are not read, and zero where ``ZERO``."""
    token = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    token = gl.expand_dims(gl.expand_dims(token, 0), 2)
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 0)
    live = (per_warp(at, LAYOUT) + token < limit) & (word >= 0)
    where = BASE + (row + (token * TOKEN_STRIDE + (word + PLANE)))
    if ZERO:
        x = gl.load(where, mask=live, other=0, eviction_policy="evict_first")
    else:
        x = gl.load(where, mask=live, eviction_policy="evict_first")
    return x


@gluon.jit
def load_rows(
    BASE, low, high, at, length, num_pages, PAGE_STRIDE: gl.constexpr, TOKEN_STRIDE: gl.constexpr, D: gl.constexpr,
    T: gl.constexpr, PAGE: gl.constexpr, PACKED: gl.constexpr, ZERO: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Words of K or V rows of the tokens from ``at``; a page outside of the pool counts as past the end."""
    inside = per_token((low >= 0) & (low < num_pages), (high >= 0) & (high < num_pages), T, PAGE, LAYOUT)
    limit = gl.where(inside, length, 0)
    if PAGE < T:
        row_low = low.to(gl.int64) * PAGE_STRIDE
        row_high = high.to(gl.int64) * PAGE_STRIDE - PAGE * TOKEN_STRIDE
    else:
        row_low = low.to(gl.int64) * PAGE_STRIDE + at % PAGE * TOKEN_STRIDE
        row_high = row_low
    row = per_token(row_low, row_high, T, PAGE, LAYOUT)
    if PACKED:
        Q: gl.constexpr = D // 16
        a = _load_words(BASE, row, at, limit, 0, Q, TOKEN_STRIDE, T, ZERO, LAYOUT)
        b = _load_words(BASE, row, at, limit, Q, Q, TOKEN_STRIDE, T, ZERO, LAYOUT)
        c = _load_words(BASE, row, at, limit, 2 * Q, Q, TOKEN_STRIDE, T, ZERO, LAYOUT)
    else:
        a = _load_words(BASE, row, at, limit, 0, D // 4, TOKEN_STRIDE, T, ZERO, LAYOUT)
        b = a
        c = a
    return a, b, c


@gluon.jit
def _merge(
    OUT, LSE, PART_O, PART_ML, V_SCALE, first, count, seq, kv_head, q_tile, v_scale,
    OUT_TOKEN_STRIDE: gl.constexpr, OUT_HEAD_STRIDE: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    Q_LEN: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, CHANNEL_SCALES: gl.constexpr, WRITE_LSE: gl.constexpr,
    PIECES: gl.constexpr, AT_ONCE: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """Merge ``count`` pieces of a pair, those of the programs from ``first`` on, ``AT_ONCE`` query rows at a time."""
    part = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, MERGED)))
    row = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, gl.SliceLayout(2, MERGED)))
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, MERGED)))
    channel3 = gl.expand_dims(gl.expand_dims(channel, 0), 0)
    out_row = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, gl.SliceLayout(0, MERGED)))
    for rows in range(0, ROWS, AT_ONCE):
        if q_tile * ROWS + rows < Q_LEN * GROUP:
            top = gl.full([AT_ONCE], NEVER, gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, MERGED)))
            total = gl.zeros([AT_ONCE], gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, MERGED)))
            acc = gl.zeros([AT_ONCE, D], gl.float32, layout=gl.SliceLayout(0, MERGED))
            for base in range(0, count, PIECES):
                live = base + part < count
                # Only the first piece begins where the pair does: see the choice of slots below.
                slot = 2 * (first + base + part) + gl.where(base + part == 0, 1, 0)
                slot = gl.expand_dims(slot.to(gl.int64), 1)
                real = gl.expand_dims(live, 1) & (gl.expand_dims(row, 0) >= 0)
                at = PART_ML + slot * (2 * ROWS) + (gl.expand_dims(row, 0) + rows)
                m = gl.load(at, mask=real, other=NEVER, cache_modifier=".cg")
                w = gl.load(at + ROWS, mask=real, other=0.0, cache_modifier=".cg")
                o_at = gl.expand_dims(slot * (ROWS * D) + (gl.expand_dims(row, 0) + rows) * D, 2) + channel3
                real3 = gl.expand_dims(real, 2) & (channel3 >= 0)
                o = gl.load(PART_O + o_at, mask=real3, other=0.0, cache_modifier=".cg").to(gl.float32)
                new_top = gl.maximum(top, gl.max(m, 0))
                w = w * gl.exp2(m - gl.expand_dims(new_top, 0))
                shrink = gl.exp2(top - new_top)
                total = total * shrink + gl.sum(w, 0)
                shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(0, MERGED))), 1)
                acc = acc * shrink + gl.sum(o * gl.expand_dims(w, 2), 0)
                top = new_top
            n = q_tile * ROWS + rows + out_row
            divisor = gl.convert_layout(
                gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, gl.SliceLayout(0, MERGED))
            )
            o = acc / gl.expand_dims(divisor, 1)
            if CHANNEL_SCALES:
                o = o * gl.expand_dims(gl.load(V_SCALE + kv_head * D + channel), 0)
            o = o * v_scale
            token = seq.to(gl.int64) * Q_LEN + n // GROUP
            o_at = token * OUT_TOKEN_STRIDE + (kv_head * GROUP + n % GROUP) * OUT_HEAD_STRIDE
            real2 = gl.expand_dims(n < Q_LEN * GROUP, 1) & (gl.expand_dims(channel, 0) >= 0)
            gl.store(OUT + gl.expand_dims(o_at, 1) + gl.expand_dims(channel, 0), o.to(OUT.dtype.element_ty), mask=real2)
            if WRITE_LSE:
                n = q_tile * ROWS + rows + row
                lse = gl.where(total == 0.0, -float("inf"), (top + gl.log2(total)) * LN_2)
                lse_at = (seq * KV_HEADS + kv_head) * (Q_LEN * GROUP) + n
                gl.store(LSE + lse_at, lse, mask=n < Q_LEN * GROUP)


@gluon.jit
def finish(
    o, best, sums, OUT, LSE, PART_O, PART_ML, ARRIVED, V_SCALE, v_scale, tile, tile_end, seq_tiles, pair_begin, line,
    sharing, seq, pair,
    OUT_TOKEN_STRIDE: gl.constexpr, OUT_HEAD_STRIDE: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    Q_LEN: gl.constexpr, ROWS: gl.constexpr, Q_TILES: gl.constexpr, D: gl.constexpr, CHANNEL_SCALES: gl.constexpr,
    WRITE_LSE: gl.constexpr, MERGE_HERE: gl.constexpr, PIECES: gl.constexpr, AT_ONCE: gl.constexpr,
    OUTPUT: gl.constexpr, MERGED: gl.constexpr, USED_ONLY: gl.constexpr,
):  # fmt: skip
    """Write a pair's output, or a piece of it; with MERGE_HERE, merge the pieces where this is the last.

    ``o`` (ROWS, D) is divided by ``sums`` (ROWS,) already; ``best`` (ROWS,) are the maxima, in log2 units. With
    USED_ONLY a piece leaves out rows that only fill up a product's height, and which nobody reads.
    """
    row_o = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUTPUT))
    channel_o = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT)), 0)
    kv_head = pair // Q_TILES
    q_tile = pair % Q_TILES
    if (tile == 0) & (tile_end == seq_tiles):
        if CHANNEL_SCALES:
            o = o * gl.load(V_SCALE + kv_head * D + channel_o)
        o = o * v_scale
        n_out = q_tile * ROWS + row_o
        token = seq.to(gl.int64) * Q_LEN + n_out // GROUP
        out_at = token * OUT_TOKEN_STRIDE + (kv_head * GROUP + n_out % GROUP) * OUT_HEAD_STRIDE
        real = gl.expand_dims(n_out < Q_LEN * GROUP, 1) & (channel_o >= 0)
        gl.store(OUT + gl.expand_dims(out_at, 1) + channel_o, o.to(OUT.dtype.element_ty), mask=real)
        if WRITE_LSE:
            lse = gl.where(sums == 0.0, -float("inf"), (best + gl.log2(sums)) * LN_2)
            gl.store(LSE + (seq * KV_HEADS + kv_head) * (Q_LEN * GROUP) + n_out, lse, mask=n_out < Q_LEN * GROUP)
    else:
        # A stretch has at most two unfinished ends: where it enters a pair, and where it leaves one.
        slot = (2 * gl.program_id(0) + gl.where(tile == 0, 1, 0)).to(gl.int64)
        used = row_o >= 0
        if USED_ONLY:
            used = q_tile * ROWS + row_o < Q_LEN * GROUP
        gl.store(PART_ML + slot * (2 * ROWS) + row_o, best, mask=used)
        gl.store(PART_ML + slot * (2 * ROWS) + ROWS + row_o, sums, mask=used)
        part_at = PART_O + gl.expand_dims(slot * (ROWS * D) + row_o * D, 1) + channel_o
        gl.store(part_at, o.to(PART_O.dtype.element_ty), mask=gl.expand_dims(used, 1) & (channel_o >= 0))
        if MERGE_HERE:
            first = _program_of(pair_begin, line, sharing)
            count = _program_of(pair_begin + seq_tiles - 1, line, sharing) - first + 1
            meet()
            arrived = gl.atomic_add(ARRIVED + seq * (KV_HEADS * Q_TILES) + pair, 1, sem="acq_rel")
            if arrived == count - 1:
                _merge(
                    OUT, LSE, PART_O, PART_ML, V_SCALE, first, count, seq, kv_head, q_tile, v_scale,
                    OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE, KV_HEADS, GROUP, Q_LEN, ROWS, D, CHANNEL_SCALES, WRITE_LSE,
                    PIECES, AT_ONCE, MERGED,
                )  # fmt: skip
                gl.store(ARRIVED + seq * (KV_HEADS * Q_TILES) + pair, 0)


@gluon.jit(
    do_not_specialize=["num_seqs", "programs", "scale_seq_stride", "scale_head_stride"],
    do_not_specialize_on_alignment=["OUT", "SEQ_LENS", "LSE", "V_SCALE"],
)
def merge_kernel(
    OUT,  # (num_seqs * Q_LEN, heads, D) model dtype
    SEQ_LENS,  # (num_seqs,) int32, 0 for padding
    PART_O,  # (2 * programs, ROWS, D) f16: each piece's own output
    PART_ML,  # (2 * programs, 2, ROWS) f32: maximum and sum of weights
    LSE,  # (num_seqs, KV_HEADS, Q_LEN * GROUP) f32, natural log; only with WRITE_LSE
    V_SCALE,
    num_seqs,
    programs,  # of the launch that made the pieces
    scale_seq_stride,
    scale_head_stride,
    OUT_TOKEN_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    Q_LEN: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    PACKED: gl.constexpr,
    CHANNEL_SCALES: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    LEAST: gl.constexpr,
    MAX_SEQS: gl.constexpr,
    PDL: gl.constexpr,
    CHUNK: gl.constexpr,  # pieces read at once
    PARTS: gl.constexpr,
    SEQS: gl.constexpr,
):
    """One program merges one query row; rows of pairs that were not cut are left alone."""
    Q_TILES: gl.constexpr = (Q_LEN * GROUP + ROWS - 1) // ROWS
    PAIRS: gl.constexpr = KV_HEADS * Q_TILES
    n = gl.program_id(0)
    kv_head = gl.program_id(1)
    seq = gl.program_id(2)
    index = gl.arange(0, MAX_SEQS, layout=SEQS)
    # Ahead of the wait: the launch that makes the pieces has itself waited for whoever wrote the lengths.
    length = gl.load(SEQ_LENS + index, mask=index < num_seqs, other=0)
    tiles = gl.where(index < num_seqs, gl.maximum(gl.cdiv(length, TILE), 1), 0)
    line = gl.sum(tiles, 0) * PAIRS
    own = gl.sum(gl.where(index == seq, tiles, 0), 0)
    begin = gl.sum(gl.where(index < seq, tiles, 0), 0) * PAIRS + (kv_head * Q_TILES + n // ROWS) * own
    sharing = sharing_programs(line, num_seqs * PAIRS, programs, LEAST)
    first = _program_of(begin, line, sharing)
    count = _program_of(begin + own - 1, line, sharing) - first + 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if count > 1:
        part = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, PARTS))
        channel = gl.arange(0, D, layout=gl.SliceLayout(0, PARTS))
        top = NEVER
        total = 0.0
        acc = gl.zeros([D], gl.float32, layout=gl.SliceLayout(0, PARTS))
        for base in range(0, count, CHUNK):
            live = base + part < count
            # Only the first piece begins where the pair does: see the choice of slots above.
            slot = (2 * (first + base + part) + gl.where(base + part == 0, 1, 0)).to(gl.int64)
            at = PART_ML + slot * (2 * ROWS) + n % ROWS
            m = gl.load(at, mask=live, other=NEVER)
            w = gl.load(at + ROWS, mask=live, other=0.0)
            o_at = gl.expand_dims(slot * (ROWS * D) + n % ROWS * D, 1) + gl.expand_dims(channel, 0)
            o = gl.load(PART_O + o_at, mask=gl.expand_dims(live, 1) & (gl.expand_dims(channel, 0) >= 0), other=0.0)
            new_top = gl.maximum(top, gl.max(m, 0))
            w = w * gl.exp2(m - new_top)
            shrink = gl.exp2(top - new_top)
            total = total * shrink + gl.sum(w, 0)
            acc = acc * shrink + gl.sum(o.to(gl.float32) * gl.expand_dims(w, 1), 0)
            top = new_top
        o = acc / gl.where(total == 0.0, 1.0, total)
        if CHANNEL_SCALES:
            o = o * gl.load(V_SCALE + kv_head * D + channel)
        else:
            o = o * gl.load(V_SCALE + seq * scale_seq_stride + kv_head * scale_head_stride)
        if PACKED:
            o = o * PACKED_FACTOR
        token = seq.to(gl.int64) * Q_LEN + n // GROUP
        o_at = token * OUT_TOKEN_STRIDE + (kv_head * GROUP + n % GROUP) * OUT_HEAD_STRIDE
        gl.store(OUT + o_at + channel, o.to(OUT.dtype.element_ty))
        if WRITE_LSE:
            lse = gl.where(total == 0.0, -float("inf"), (top + gl.log2(gl.where(total == 0.0, 1.0, total))) * LN_2)
            gl.store(LSE + (seq * KV_HEADS + kv_head) * (Q_LEN * GROUP) + n, lse)
