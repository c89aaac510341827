"""Tuned launch configurations as data, by architecture, head size and query rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTuning:
    """How the decode kernel is launched.

    Attributes:
        tile: KV tokens of a tile.
        warps: warps of a program.
        stages: depth of the load pipeline.
        programs_per_sm: programs that run side by side on one SM.
    """

    tile: int
    warps: int
    stages: int
    programs_per_sm: int


# Until measured there: what the naive kernel of the peers' study found best on an H200 (tile 128 at d 64 and 128).
DEFAULT = {
    64: DecodeTuning(tile=128, warps=4, stages=3, programs_per_sm=2),
    128: DecodeTuning(tile=64, warps=4, stages=3, programs_per_sm=2),
    256: DecodeTuning(tile=64, warps=4, stages=2, programs_per_sm=2),
}


def decode_tuning(head_size: int) -> DecodeTuning:
    """The configuration for a head size."""
    return DEFAULT[head_size]


@dataclass(frozen=True)
class StreamTuning:
    """How the streaming kernel is built and launched.

    Attributes:
        warps: warps of a program.
        row_groups: warps that share tokens, each with its own query rows.
        rows: query rows of a warp, 8 or 16; of a program, from 8 to 64, where ``wide``.
        tokens: KV tokens that a warp takes in a step, 16 or 32.
        programs_per_sm: programs that run side by side on one SM.
        least_tiles: fewest tiles that are worth a program.
        max_registers: cap for the compiler, so that the programs fit; None for no cap.
        pdl: programmatic dependent launch.
        merge_here: the last program of a pair merges its pieces, else a second launch does; None chooses by the
            number of pieces.
        wide: the kernel whose warps share tokens and rows; head sizes 128 and 256, e4m3 only.
    """

    warps: int = 4
    row_groups: int = 1
    rows: int = 8
    tokens: int = 16
    programs_per_sm: int = 2
    least_tiles: int = 1
    max_registers: int | None = None
    pdl: bool = True
    merge_here: bool | None = None
    wide: bool = False


def stream_tuning(head_size: int, rows: int, packed: bool = False) -> StreamTuning:
    """The configuration for a head size and a number of query rows of a KV head."""
    if rows <= 8:
        return STREAM[head_size]
    if head_size == 64 or packed:
        # Row groups of 16: beyond 64 rows the cache is read once for every 64.
        groups = 1 if rows <= 16 else 2 if rows <= 32 else 4
        tokens = 32 if head_size == 64 else 16
        half = head_size == 256  # sums of 16 rows would not fit the registers
        return StreamTuning(rows=8 if half else 16, row_groups=min(4, 2 * groups) if half else groups, tokens=tokens)
    if head_size == 128 and rows <= 16:
        return StreamTuning(rows=16, least_tiles=2)
    return StreamTuning(rows=16 if rows <= 16 else 32, wide=True)


# Measured on an H200 on 2026-12-02, Triton 3.6, page 16, best of the configurations tried over batch x context of
# 1x4096 to 64x2048: see docs/kernels.md.
STREAM = {
    64: StreamTuning(tokens=32, warps=2, programs_per_sm=6, max_registers=168),
    128: StreamTuning(warps=2, programs_per_sm=6, max_registers=168, least_tiles=4),
    256: StreamTuning(warps=2, programs_per_sm=4, least_tiles=4),
}
