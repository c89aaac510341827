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
