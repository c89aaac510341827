"""Tables of a result file in Markdown: ``python -m mjolnir.bench.gpu.tables docs/gpu.md docs/results/gpu/*.json``."""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjolnir.bench.gpu.report import OURS

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
AGREEMENT = {
    "shape": "shape",
    "engine": "engine",
    "against": "compared with",
    "case": "prompts",
    "same": "same texts",
    "logprob_error_median": "log-probability: error, median",
    "logprob_error_p99": "p99",
    "behind_max": "first difference: furthest behind",
    "far": "over 1 nat behind",
    "ran": "steps",
    "graph_replays": "graph replays",
    "kernels_compiled": "T5 kernels compiled",
    "sync_count": "syncs",
    "extra": "",
}
LOAD = {
    "shape": "shape",
    "layers": "layers",
    "load": "load",
    "rate": "requests/s",
    "engine": "engine",
    "requests": "requests",
    "output_tokens_per_s": "output tokens/s",
    "rounds_tokens_per_s": "by round",
    "itl_ms_p50": "between tokens, ms: p50",
    "itl_ms_p99": "p99",
    "ttft_ms_p50": "first token, ms: p50",
    "ttft_ms_p99": "p99 of it",
    "in_flight": "in flight",
    "ran": "steps",
}
NEAR = 0.98  # a ratio from which on T5 counts as level


def render(rows: Sequence[dict[str, Any]], failures: Sequence[dict[str, str]]) -> str:
    """Everything: engines, agreement, times as ratios, failures."""
    lines = [*_engines(rows), *_agreement(rows), *_loads(rows)]
    for shape in dict.fromkeys(row["shape"] for row in rows if row["kind"] == "speed"):
        lines += _speed(shape, [row for row in rows if row["kind"] == "speed" and row["shape"] == shape])
    lines += [f"FAILED {failure['where']}: {failure['cause']}" for failure in failures]
    return "\n".join(lines) + "\n"


def _engines(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = ("shape", "layers", "engine", "graph_mode", "full_graphs", "impls", "start_seconds")
    return _table(columns, [row for row in rows if row["kind"] == "engine"])


def _agreement(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = [row | {"ran": _ran(row["steps"]), "extra": _extra(row)} for row in rows if row["kind"] == "agreement"]
    return _table(tuple(AGREEMENT.values()), [{AGREEMENT[key]: row.get(key) for key in AGREEMENT} for row in found])


def _loads(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = [row | {"ran": _ran(row["steps"])} for row in rows if row["kind"] == "load"]
    return _table(tuple(LOAD.values()), [{LOAD[key]: row.get(key) for key in LOAD} for row in found])


def _ran(steps: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in steps.items() if name.startswith(("t5:", "fallback:")))


def _extra(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {row[name]:.0f}" for name in ("drafted", "accepted", "preempted") if name in row)


def _speed(shape: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    name = f"{shape}, {rows[0]['layers']} layers"
    title = "output tokens/s by the clock, and in brackets over the best stock backend"
    lines = [f"{name}: {title}", "", *_cells(rows, "output_tokens_per_s", "over_best_stock")]
    if any(row.get("gpu_ms") for row in rows):
        title = "ms a step on the GPU, and in brackets how many times as fast as the best stock backend"
        lines += [f"{name}: {title}", "", *_cells(rows, "gpu_ms", "gpu_over_best_stock")]
    return lines


def _cells(rows: Sequence[dict[str, Any]], figure: str, ratio: str) -> list[str]:
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    table = []
    for cell in dict.fromkeys((row["streams"], row["context"]) for row in rows):
        found = {row["engine"]: row for row in rows if (row["streams"], row["context"]) == cell}
        texts = {name: _cell(found.get(name), figure, ratio) for name in engines}
        table.append({"streams x context": f"{cell[0]}x{cell[1]}"} | texts)
    return [*_table(("streams x context", *engines), table), *_verdict(rows, ratio)]


def _verdict(rows: Sequence[dict[str, Any]], ratio: str) -> list[str]:
    ours = [row for row in rows if row["engine"] == OURS and row.get(ratio)]
    if not ours:
        return []
    long = [row[ratio] for row in ours if row["context"] >= 8192]
    level = sum(row[ratio] >= NEAR for row in ours)
    text = f"T5 level (ratio of {NEAR} or more) or ahead in {level} of {len(ours)} cells"
    if long:
        ahead = sum(each > 1 for each in long)
        text += f"; from 8K on ahead in {ahead} of {len(long)}, geometric mean {statistics.geometric_mean(long):.2f}"
    return [f"{text}.", ""]


def _cell(row: dict[str, Any] | None, figure: str, ratio: str) -> str:
    if row is None or row.get(figure) is None:
        return ""
    beside = f" ({row[ratio]})" if row["engine"].startswith(OURS) and row.get(ratio) else ""
    return f"{row[figure]}{beside}"


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    return [*head, *(f"| {' | '.join(row)} |" for row in cells), ""]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    """Write the tables of result files between the marks of a page."""
    page, *paths = map(Path, sys.argv[1:])
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = []
    for path in paths:
        document = json.loads(path.read_text())
        versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        parts.append(f"`{document['command']}`, {document['date']}, {document['gpu']}; {versions}.\n")
        parts.append(render(document["rows"], document["failures"]))
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(parts) + f"{END}{after}")


if __name__ == "__main__":
    main()
