"""The figures of `mjolnir bench kernel`: a row a kernel and cell, comparisons, means, the table for a terminal."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from mjolnir.bench.kernel_cells import BALANCED, SKEWED, Cell

T5 = "T5"

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """What a kernel gave in a cell.

    Attributes:
        us: median time of a launch; None where the output is wrong or the kernel failed.
        low_us: least.
        high_us: most.
        relative_error: ‖out - expected‖ / ‖expected‖.
        fault: why there is no time; empty where there is.
    """

    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    relative_error: float | None = None
    fault: str = ""


def row(cell: Cell, kernel: str, measurement: Measurement, ceiling_us: float) -> Row:
    """One kernel's figures in one cell."""
    us = measurement.us
    figures: Row = {
        "shape": str(cell.shape),
        "batch": cell.batch.name,
        "q_len": cell.q_len,
        "page_size": cell.page_size,
        "layout": cell.layout,
        "kv": cell.kv_format,
        "bytes": cell.bytes,
        "kernel": kernel,
        "us": _rounded(us, 2),
        "low_us": _rounded(measurement.low_us, 2),
        "high_us": _rounded(measurement.high_us, 2),
        "ceiling_us": round(ceiling_us, 2),
        "of_ceiling": None if us is None else round(ceiling_us / us, 3),
        "relative_error": _rounded(measurement.relative_error, 6),
    }
    return {**figures, "fault": measurement.fault} if measurement.fault else figures


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows, T5's with what they are compared to: ``ratio`` is the other's time over T5's, above 1 in T5's favour.

    Over an fp8 cache the other is the best peer in the same cell, ``best_peer``; over an e2m3 cache it is T5 over
    an fp8 cache. ``of_balanced`` is T5's time for the balanced batch over that for the skewed one.
    """
    times = {(*place_of(row), row["kv"], row["kernel"]): row["us"] for row in rows if row["us"] is not None}
    result = []
    for original in rows:
        row = dict(original)
        if row["kernel"] == T5 and row["us"] is not None:
            place = place_of(row)
            row |= _against_other(times, place, row)
            balanced = times.get((place[0], BALANCED.name, *place[2:], row["kv"], T5))
            if row["batch"] == SKEWED.name and balanced:
                row["of_balanced"] = round(balanced / row["us"], 3)
        result.append(row)
    return result


def summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means of what `compared` found, one line each."""
    ours = [row for row in compared(rows) if row["kernel"] == T5]
    fp8 = [row for row in ours if row["kv"] == "fp8"]
    lines = []
    for q_len in sorted({row["q_len"] for row in ours}):
        named: dict[str, list[Any]] = {
            "of the read ceiling": [row.get("of_ceiling") for row in fp8 if row["q_len"] == q_len],
            "times as fast as the best peer": [row.get("ratio") for row in fp8 if row["q_len"] == q_len],
            "times as fast, each at its best page size and layout": _at_their_best(rows, q_len),
            "times as fast over e2m3 as over fp8": [
                row.get("ratio") for row in ours if row["kv"] == "e2m3" and row["q_len"] == q_len
            ],
            "of the balanced batch's speed on the skewed one": [
                row.get("of_balanced") for row in fp8 if row["q_len"] == q_len
            ],
        }
        for what, values in named.items():
            known = [value for value in values if value is not None]
            if known:
                mean, span = geometric_mean(known), f"{min(known):.2f} to {max(known):.2f}"
                lines.append(f"q_len {q_len}: T5 {mean:.2f} {what} (geometric mean of {len(known)}: {span})")
    return lines


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def table(rows: Sequence[Row]) -> Table:
    """T5's rows for a terminal."""
    columns = ("shape", "batch", "q_len", "page_size", "layout", "kv", "us", "of_ceiling", "best_peer", "best_peer_us")
    rendered = Table(*(column.replace("_", " ") for column in columns), "ratio", "error", box=None)
    for row in compared(rows):
        if row["kernel"] == T5:
            error = "" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
            values = [_cell(row.get(column)) for column in (*columns, "ratio")]
            rendered.add_row(*values, f"[red]{row['fault']}[/]" if row.get("fault") else error)
    return rendered


def progress(rows: Sequence[Row]) -> str:
    """A cell's rows in one line."""
    place = rows[0]
    figures = ", ".join(f"{row['kernel']} {row.get('fault') or row['us']}" for row in rows)
    pages = f"pages of {place['page_size']} {place['layout']} {place['kv']}"
    return f"{place['shape']} {place['batch']} q_len {place['q_len']} {pages}: us: {figures}"


def place_of(row: Row) -> tuple[Any, ...]:
    """What rows of one cell have in common, but for the KV format."""
    return row["shape"], row["batch"], row["q_len"], row["page_size"], row["layout"]


def _against_other(times: Mapping[tuple[Any, ...], float], place: tuple[Any, ...], row: Row) -> Row:
    if row["kv"] == "fp8":
        others = {key[-1]: us for key, us in times.items() if key[:-2] == place and key[-2] == "fp8" and key[-1] != T5}
    else:
        known = times.get((*place, "fp8", T5))
        others = {} if known is None else {"T5 over fp8": known}
    if not others:
        return {}
    best = min(others, key=lambda name: others[name])
    return {"best_peer": best, "best_peer_us": others[best], "ratio": round(others[best] / row["us"], 3)}


def _at_their_best(rows: Sequence[Row], q_len: int) -> list[float]:
    """Best peer's time over T5's for each shape and batch, each at its best page size and layout."""
    best: dict[tuple[str, str, bool], float] = defaultdict(lambda: math.inf)
    for row in rows:
        if row["kv"] == "fp8" and row["q_len"] == q_len and row["us"] is not None:
            key = row["shape"], row["batch"], row["kernel"] == T5
            best[key] = min(best[key], row["us"])
    ours = {key[:2]: us for key, us in best.items() if key[2]}
    return [best[*key, False] / us for key, us in ours.items() if (*key, False) in best]


def _rounded(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
