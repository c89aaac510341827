"""The plan on the device: from live sequence lengths to equal shares of work for a fixed number of programs.

All tiles of all (sequence, KV head, query tile) pairs form one line, sequence by sequence; program p of P takes the
stretch from ``total * p // P`` to ``total * (p + 1) // P``, where P is the number of programs or of tiles, whichever is
less. So every program reads the same number of tiles, however
skewed the lengths are, and the grid depends on nothing but the device. What the other kernels need to find their
place on the line is a prefix sum over the sequences, and the sequence in which each stretch begins.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "programs"], do_not_specialize_on_alignment=["SEQ_LENS"])
def plan_kernel(
    SEQ_LENS,  # (num_seqs,) int32, tokens of each sequence, 0 for padding
    CUM_TILES,  # (num_seqs + 1,) int32, out: tiles ahead of each sequence
    FIRST_SEQ,  # (programs,) int32, out: sequence in which each program's stretch begins
    num_seqs,
    programs,  # of the decode kernel's grid
    PAIRS_PER_SEQ: tl.constexpr,  # KV heads times query tiles
    TILE: tl.constexpr,  # KV tokens of a tile
    MAX_SEQS: tl.constexpr,  # power of two
    CHUNK: tl.constexpr,  # programs looked up at once
):
    """One program plans the whole step."""
    seq = tl.arange(0, MAX_SEQS)
    live = seq < num_seqs
    length = tl.load(SEQ_LENS + seq, mask=live, other=0)
    # A sequence without tokens still owns a tile: somebody must write its zeros.
    tiles = tl.where(live, tl.maximum((length + TILE - 1) // TILE, 1), 0)
    ends = tl.cumsum(tiles, 0)
    tl.store(CUM_TILES + seq + 1, ends, mask=live)
    tl.store(CUM_TILES + seq, ends - tiles, mask=seq == 0)
    total = tl.sum(tiles, 0).to(tl.int64) * PAIRS_PER_SEQ
    sharing = tl.minimum(total, programs)
    ends64 = ends.to(tl.int64) * PAIRS_PER_SEQ
    for first in range(0, programs, CHUNK):
        program = first + tl.arange(0, CHUNK)
        start = total * program // sharing
        before = tl.sum(((ends64[None, :] <= start[:, None]) & live[None, :]).to(tl.int32), 1)
        tl.store(FIRST_SEQ + program, tl.minimum(before, num_seqs - 1), mask=program < programs)
