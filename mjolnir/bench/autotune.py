"""Finds the kernels' launch configurations on this machine's GPU: ``python -m mjolnir.bench.autotune``.

Each class of head size, KV format and query rows is measured on one head shape over a few batches, with every
candidate; the one that comes nearest to reading at full speed, by geometric mean, is written to
``mjolnir/kernels/tuned``.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mjolnir.bench.graph_timing import ReadCeiling, driver_version
from mjolnir.bench.kernel_cells import KV_FORMATS, Cell, Shape, uniform
from mjolnir.bench.kernel_decode import compile_ahead, make_pool, measure
from mjolnir.bench.kernel_rows import geometric_mean
from mjolnir.bench.results import write_result
from mjolnir.bench.verify import usable_device
from mjolnir.kernels.stream_runner import StreamRunner
from mjolnir.kernels.tuning import TUNED, StreamTuning
from mjolnir.runner import HEAD_SIZES

BATCHES = tuple(uniform(*pair) for pair in ((1, 4096), (4, 8192), (1, 131072), (16, 4096), (64, 2048)))


@dataclass(frozen=True)
class Class:
    """Steps that share a configuration.

    Attributes:
        shape: the heads that it is measured on.
        q_len: query tokens that make up the rows.
        query_rows: most query rows of a KV head.
        kv_format: ``fp8`` or ``e2m3``.
    """

    shape: Shape
    q_len: int
    query_rows: int
    kv_format: str = "fp8"


CLASSES = (
    Class(Shape(9, 3, 64), 1, 8),
    Class(Shape(9, 3, 64), 4, 16),
    Class(Shape(32, 4, 64), 4, 32),
    Class(Shape(32, 2, 64), 4, 64),
    Class(Shape(32, 8, 128), 1, 8),
    Class(Shape(32, 8, 128), 4, 16),
    Class(Shape(64, 8, 128), 4, 32),
    Class(Shape(24, 4, 256), 1, 8),
    Class(Shape(24, 4, 256), 2, 16),
    Class(Shape(24, 4, 256), 4, 32),
    Class(Shape(32, 8, 128), 1, 8, "e2m3"),
    Class(Shape(32, 8, 128), 4, 16, "e2m3"),
    Class(Shape(64, 8, 128), 4, 32, "e2m3"),
    Class(Shape(24, 4, 256), 1, 8, "e2m3"),
    Class(Shape(24, 4, 256), 2, 16, "e2m3"),
    Class(Shape(24, 4, 256), 4, 32, "e2m3"),
)


def candidates(kind: Class, arch: str) -> Iterator[StreamTuning]:
    """Configurations worth a try for a class on an architecture, ``sm_90`` and the like."""
    yield from dict.fromkeys(_stream_candidates(kind, arch))
    d, rows = kind.shape.head_size, kind.query_rows
    if d > 64 and kind.kv_format == "fp8" and rows > 8:
        for programs, cap in ((2, None), (3, 168)) if arch != "sm_90" or (d, rows) == (256, 16) else ():
            yield StreamTuning(kernel="wide", rows=rows, programs_per_sm=programs, max_registers=cap)
    if d > 64 and kind.kv_format == "fp8" and arch == "sm_90":
        yield from _wgmma_candidates(kind)


def _stream_candidates(kind: Class, arch: str) -> Iterator[StreamTuning]:
    d, rows = kind.shape.head_size, kind.query_rows
    # Warps, programs side by side, cap of registers: what fits the 64 Ki registers of an SM.
    fits: tuple[tuple[int, int, int | None], ...] = ((2, 4, None), (4, 2, None))
    if rows <= 8:
        fits = ((2, 4, None), (2, 6, 168), (2, 8, 128), (4, 2, None), (4, 3, 168))
    if arch == "sm_90" and kind.kv_format == "fp8" and d > 64:
        # The others were slower in every batch, and from 9 rows on all were (H200, 2026-12-02 and 03).
        fits = () if rows > 8 else ((2, 6, 168),) if d == 128 else ((2, 4, None),)
    height = 8 if rows <= 8 or d == 256 else 16
    groups = max(1, rows // height)
    tokens = 32 if d == 64 else 16
    for warps, programs, cap in fits:
        if groups > warps or (groups == warps and kind.kv_format == "fp8" and d != 64):
            continue
        tuning = StreamTuning(
            warps=warps, row_groups=groups, rows=height, tokens=tokens, programs_per_sm=programs, max_registers=cap
        )
        yield tuning
        if rows <= 8:
            yield replace(tuning, least_tiles=4)
    if groups == 4:
        yield StreamTuning(warps=4, row_groups=4, rows=height, tokens=tokens)


def _wgmma_candidates(kind: Class) -> Iterator[StreamTuning]:
    # Tokens of a tile, stages, programs side by side, cap of registers, fewest tiles of a program: what fits 64 Ki
    # registers and 227 KiB, less what was 5 % slower in every batch, H200, 2026-12-03.
    fits: tuple[tuple[int, int, int, int | None, int], ...]
    if kind.shape.head_size == 256:
        fits = ((64, 2, 2, None, 1), (64, 2, 2, None, 2))
        if kind.query_rows <= 16:
            fits += ((64, 3, 2, None, 2),)
    elif kind.query_rows == 32:
        fits = ((64, 2, 3, 168, 1), (64, 2, 3, 168, 2), (64, 3, 3, 168, 2), (64, 3, 2, None, 2), (128, 2, 2, None, 1))
    else:
        fits = (
            (64, 2, 4, 128, 1),
            (64, 2, 4, 128, 2),
            (64, 3, 3, 168, 1),
            (64, 3, 3, 168, 2),
            (64, 3, 2, None, 2),
            (128, 2, 2, None, 1),
        )
    for tokens, stages, programs, cap, least in fits:
        yield StreamTuning(
            kernel="wgmma", rows=kind.query_rows, tokens=tokens, stages=stages, programs_per_sm=programs,
            max_registers=cap, least_tiles=least,
        )  # fmt: skip


def tune(device: torch.device, arch: str, classes: Sequence[Class], seconds: float) -> list[dict[str, Any]]:
    """Measure classes; those that the time does not suffice for are left out."""
    cells = {kind: [Cell(kind.shape, b, kind.q_len, kv_format=kind.kv_format) for b in BATCHES] for kind in classes}
    compile_ahead((cell, tuning) for kind in classes for cell in cells[kind] for tuning in candidates(kind, arch))
    pool = make_pool(device)
    ceiling = ReadCeiling(pool)
    deadline = time.monotonic() + seconds
    found = []
    for kind in classes:
        if time.monotonic() > deadline:
            sys.stderr.write(f"autotune: no time left for {kind}\n")
            continue
        tried = []
        for tuning in candidates(kind, arch):
            times = {cell.batch.name: _us(cell, tuning, pool) for cell in cells[kind]}
            if all(math.isfinite(us) for us in times.values()):
                score = geometric_mean([ceiling.us(cell.bytes) / times[cell.batch.name] for cell in cells[kind]])
                tried.append((score, tuning, times))
        if not tried:
            sys.stderr.write(f"autotune: nothing works for {kind}\n")
            continue
        score, tuning, times = max(tried, key=lambda entry: entry[0])
        sys.stderr.write(f"{kind}: {score:.3f} of the ceiling, {tuning}\n")
        found.append(
            {
                "kv_format": kind.kv_format,
                "head_size": kind.shape.head_size,
                "query_rows": kind.query_rows,
                "tuning": asdict(tuning),
                "measured": {"shape": str(kind.shape), "q_len": kind.q_len, "us": times, "fraction": round(score, 3)},
                "others": [{"tuning": _changed(t), "fraction": round(s, 3), "us": us} for s, t, us in tried],
            }
        )
    return found


def _us(cell: Cell, tuning: StreamTuning, pool: torch.Tensor) -> float:
    try:
        result = measure(cell, StreamRunner(cell.config(pool.device), tuning=tuning, ahead=False), pool)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"autotune: {cell}, {tuning}: {str(error)[:200]}\n")
        return math.inf
    if result.fault:
        sys.stderr.write(f"autotune: {cell}, {tuning}: {result.fault}\n")
    return math.inf if result.us is None else round(result.us, 2)


def _changed(tuning: StreamTuning) -> dict[str, Any]:
    """What of a configuration is not the default."""
    default = asdict(StreamTuning())
    return {name: value for name, value in asdict(tuning).items() if value != default[name]}


def main() -> None:
    """Tune, and write the file of this machine's architecture."""
    parser = argparse.ArgumentParser(prog="python -m mjolnir.bench.autotune", description=__doc__)
    parser.add_argument("--out", type=Path, help="file to write; default: that of this GPU's architecture")
    parser.add_argument("--time-budget", type=float, default=math.inf, help="seconds after which no class is begun")
    parser.add_argument("--kv", choices=KV_FORMATS, help="only this KV format")
    parser.add_argument("--head-size", type=int, nargs="+", choices=HEAD_SIZES, help="only these head sizes")
    arguments = parser.parse_args()
    device = usable_device("cuda")
    major, minor = torch.cuda.get_device_capability()
    classes = [
        kind
        for kind in CLASSES
        if arguments.kv in (None, kind.kv_format) and kind.shape.head_size in (arguments.head_size or HEAD_SIZES)
    ]
    out = arguments.out or TUNED / f"sm_{major}{minor}.json"
    write_result(
        out,
        what="Launch configurations of T5's kernels, and the microseconds of a step that chose them (page 16, L2-cold)",
        command="python -m mjolnir.bench.autotune",
        rows=updated(out, tune(device, f"sm_{major}{minor}", classes, arguments.time_budget)),
        gpu=torch.cuda.get_device_name(),
        driver=driver_version(),
    )


def updated(path: Path, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file that there may be, with those of the classes that were measured now in place of theirs."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {_class_of(row): row for row in (*before, *found)}
    order = {(kind.kv_format, kind.shape.head_size, kind.query_rows): place for place, kind in enumerate(CLASSES)}
    return sorted(rows.values(), key=lambda row: order.get(_class_of(row), len(order)))


def _class_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["kv_format"], row["head_size"], row["query_rows"]


if __name__ == "__main__":
    main()
