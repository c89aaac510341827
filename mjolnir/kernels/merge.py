"""Merging the pieces of a split sequence by their log-sum-exp."""

import triton
import triton.language as tl

from mjolnir.kernels.verbs import natural_lse, nonzero


@triton.jit(do_not_specialize=["num_seqs", "all_programs"], do_not_specialize_on_alignment=["OUT", "LSE"])
def merge_kernel(
    OUT,  # (num_seqs * Q_LEN, heads, D) model dtype
    CUM_TILES,  # plan_kernel
    PART_O,  # (2 * programs, ROWS, D) f32
    PART_ML,  # (2 * programs, 2, ROWS) f32
    LSE,  # (num_seqs, KV_HEADS, Q_LEN * GROUP) f32
    num_seqs,
    all_programs,  # of the decode kernel's grid
    OUT_TOKEN_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    Q_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    CHUNK: tl.constexpr,  # pieces read at once
):
    """One program merges one query row; rows of pairs that were not cut are left alone."""
    PAIRS: tl.constexpr = KV_HEADS * Q_TILES
    n = tl.program_id(0)  # query row of a KV head
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    pair = kv_head * Q_TILES + n // ROWS
    total_tiles = tl.load(CUM_TILES + num_seqs).to(tl.int64) * PAIRS
    seq_begin = tl.load(CUM_TILES + seq).to(tl.int64)
    seq_tiles = tl.load(CUM_TILES + seq + 1).to(tl.int64) - seq_begin
    begin = seq_begin * PAIRS + pair * seq_tiles
    programs = tl.minimum(total_tiles, all_programs)
    # The programs whose stretches hold the pair's first and last tile: the inverse of total * p // programs.
    first = ((begin + 1) * programs - 1) // total_tiles
    last = ((begin + seq_tiles) * programs - 1) // total_tiles
    if last > first:
        channel = tl.arange(0, D)
        part = tl.arange(0, CHUNK)
        top = -float("inf")
        total = 0.0
        acc = tl.zeros([D], tl.float32)
        for base in range(0, (last - first + 1).to(tl.int32), CHUNK):
            program = first + base + part
            live = program <= last
            # Only the first piece begins at the pair's first tile: see the choice of slots in decode.py.
            slot = 2 * program + tl.where(base + part == 0, 1, 0)
            at = slot * (2 * ROWS) + n % ROWS
            m = tl.load(PART_ML + at, mask=live, other=-float("inf"))
            w = tl.load(PART_ML + at + ROWS, mask=live, other=0.0)
            o = tl.load(
                PART_O + (slot * ROWS + n % ROWS)[:, None] * D + channel[None, :], mask=live[:, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(m, 0))
            finite = tl.where(new_top == -float("inf"), 0.0, new_top)
            weight = tl.exp2(m - finite)
            shrink = tl.exp2(top - finite)
            total = total * shrink + tl.sum(w * weight, 0)
            acc = acc * shrink + tl.sum(o * weight[:, None], 0)
            top = new_top
        token = seq.to(tl.int64) * Q_LEN + n // GROUP
        at = token * OUT_TOKEN_STRIDE + (kv_head * GROUP + n % GROUP) * OUT_HEAD_STRIDE
        o = acc / nonzero(total)
        tl.store(OUT + at + channel, o.to(OUT.dtype.element_ty))
        if WRITE_LSE:
            lse_at = (seq * KV_HEADS + kv_head) * (Q_LEN * GROUP) + n
            tl.store(LSE + lse_at, natural_lse(top, total))
