"""The plan on the device: from live sequence lengths to equal shares of work for a fixed number of programs.

All tiles of all (sequence, KV head, query tile) pairs form one line, sequence by sequence; program p of P takes the
stretch from ``total * p // P`` to ``total * (p + 1) // P``, where P is the number of programs or of tiles, whichever is
less. So every program reads the same number of tiles, however skewed the lengths are, and the grid depends on nothing
but the device. A program's stretch is written down as where it begins and how long it is, in one row, so that the
decode kernel finds its work with a single load.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "programs"], do_not_specialize_on_alignment=["SEQ_LENS"])
def plan_kernel(
    SEQ_LENS,  # (num_seqs,) int32, tokens of each sequence, 0 for padding
    CUM_TILES,  # (num_seqs + 1,) int32, out: tiles ahead of each sequence
    WORK,  # (programs, 4) int32, out: sequence, pair and tile in which each stretch begins, and its tiles
    num_seqs,
    programs,  # of the decode kernel's grid
    PAIRS_PER_SEQ: tl.constexpr,  # KV heads times query tiles
    TILE: tl.constexpr,  # KV tokens of a tile
    MAX_SEQS: tl.constexpr,  # power of two
    CHUNK: tl.constexpr,  # stretches that one program plans
):
    """One program plans ``CHUNK`` stretches; each sums up the sequences for itself, which is cheaper than waiting."""
    seq = tl.arange(0, MAX_SEQS)
    live = seq < num_seqs
    length = tl.load(SEQ_LENS + seq, mask=live, other=0)
    # A sequence without tokens still owns a tile: somebody must write its zeros.
    tiles = tl.where(live, tl.maximum((length + TILE - 1) // TILE, 1), 0)
    ends = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(CUM_TILES + seq + 1, ends, mask=live)
        tl.store(CUM_TILES + seq, ends - tiles, mask=seq == 0)
    total = tl.sum(tiles, 0).to(tl.int64) * PAIRS_PER_SEQ
    sharing = tl.minimum(total, programs)
    program = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    begin = tl.minimum(total * program // sharing, total)
    end = tl.minimum(total * (program + 1) // sharing, total)
    # How many sequences end at or ahead of the stretch's first tile, and how many tiles those have.
    passed = (ends.to(tl.int64)[None, :] * PAIRS_PER_SEQ <= begin[:, None]) & live[None, :]
    first = tl.minimum(tl.sum(passed.to(tl.int32), 1), num_seqs - 1)
    ahead = tl.sum(tl.where(passed, tiles[None, :], 0), 1).to(tl.int64) * PAIRS_PER_SEQ
    own = tl.maximum(tl.sum(tl.where(seq[None, :] == first[:, None], tiles[None, :], 0), 1), 1)
    along = begin - ahead
    row = WORK + program * 4
    real = program < programs
    tl.store(row, first, mask=real)
    tl.store(row + 1, (along // own).to(tl.int32), mask=real)
    tl.store(row + 2, (along % own).to(tl.int32), mask=real)
    tl.store(row + 3, (end - begin).to(tl.int32), mask=real)
