"""Tuned launch configurations: named data by architecture, written by ``mjolnir.bench.autotune``.

``tuned/sm_90.json`` and its like hold, for each head size, KV format and number of query rows, a configuration and the
measurement that chose it. An architecture without a file of its own takes ``tuned/default.json``.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class StreamTuning:
    """How the streaming kernel is built and launched.

    Attributes:
        warps: warps of a program.
        row_groups: warps that share tokens, each with its own query rows.
        rows: query rows of a warp, 8 or 16; with the other kernels of a program, from 8 to 64.
        tokens: KV tokens that a warp takes in a step, 16 or 32; with ``wgmma`` a program, 64 or 128.
        programs_per_sm: programs that run side by side on one SM.
        least_tiles: fewest tiles that are worth a program.
        max_registers: cap for the compiler, so that the programs fit; None for no cap.
        pdl: programmatic dependent launch.
        merge_here: the last program of a pair merges its pieces, else a second launch does; None chooses by the
            number of pieces.
        kernel: ``stream``; or, for head sizes 128 and 256 with e4m3, ``wide``, and on Hopper ``wgmma``.
        stages: tiles of K and V that ``wgmma`` keeps in shared memory.
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
    kernel: str = "stream"
    stages: int = 2


@functools.cache
def _tuned(arch: str) -> tuple[tuple[str, int, int, StreamTuning], ...]:
    """(KV format, head size, most query rows, configuration) of an architecture, fewest rows first."""
    path = TUNED / f"{arch}.json"
    if not path.exists():
        path = TUNED / "default.json"
    entries = json.loads(path.read_text())["rows"]
    found = [(e["kv_format"], e["head_size"], e["query_rows"], StreamTuning(**e["tuning"])) for e in entries]
    return tuple(sorted(found, key=lambda entry: entry[2]))


def stream_tuning(arch: str, head_size: int, rows: int, kv_format: str = "fp8") -> StreamTuning:
    """The configuration for a head size and a number of query rows of a KV head.

    Args:
        arch: ``sm_90`` and the like.
        head_size: 64, 128 or 256.
        rows: query rows of a KV head; more than any entry has take the one with the most, in several query tiles.
        kv_format: ``fp8`` or ``e2m3``.
    """
    fitting = [(most, tuning) for kind, size, most, tuning in _tuned(arch) if (kind, size) == (kv_format, head_size)]
    return next((tuning for most, tuning in fitting if rows <= most), fitting[-1][1])
