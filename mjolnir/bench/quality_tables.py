"""The figures of docs/quality.md: ``python -m mjolnir.bench.quality_tables docs`` takes them from its result files."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from mjolnir.bench.kernel_tables import replace_section

GOAL_PCT = 0.5  # most that fp6 may add to a bf16 cache's perplexity
SIGMAS = 2.0  # a difference below so many standard errors is no difference


def render(results: Path) -> str:
    """All tables, in Markdown.

    Args:
        results: folder of the result files of ``scripts/bench quality`` and ``quality-shapes``.
    """
    documents = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    return "\n".join(_shapes(document) if "layers" not in document else _model(document) for document in documents)


def verdicts(document: dict[str, Any]) -> list[str]:
    """Where the fp6 cases of a model's document stand against the goal, a line each."""
    lines = []
    for row in document["rows"]:
        if not row["kv"].startswith("fp6"):
            continue
        change, error = row["change_pct"], row["standard_error_pct"]
        met = "met" if change <= GOAL_PCT else "missed"
        line = f"{row['case']}, {row['part']}: {change:+.2f} ± {error:.2f} % perplexity, goal {GOAL_PCT} % {met}"
        if "over_fp8_pct" in row:
            over, spread = row["over_fp8_pct"], row["over_fp8_error_pct"]
            than = "worse than" if over > SIGMAS * spread else "no worse than"
            line += f"; {than} unscaled fp8 ({over:+.2f} ± {spread:.2f} %)"
        lines.append(f"- {line}.")
    return lines


def _head(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"`{document['command']}`, {document['date']}, {document['machine']}; {versions}."


def _model(document: dict[str, Any]) -> str:
    rows = document["rows"]
    lines = [f"### {rows[0]['model']}", "", _head(document), ""]
    lines += [
        "| case | steps | tokens | perplexity | against bf16, % | standard error, % | same likeliest token, % |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['case']} | {row['part']} | {row['tokens']} | {row['perplexity']:.3f} | {row['change_pct']:+.2f} "
            f"| {row['standard_error_pct']:.2f} | {row['top1_pct']:.2f} |"
            for row in rows
        ),
        "",
        *(verdicts(document) or ["No fp6 case has been measured yet."]),
        "",
    ]
    lines += ["Error of what the cache holds, relative RMS, over layers:", "", *_layers(document["layers"]), ""]
    lines += ["Long answers, judged by the model over a bf16 cache:", "", *_plain(document["canary"])]
    return "\n".join(lines) + "\n"


def _layers(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| case | K, mean | K, worst layer | K, worst channel | V, mean | V, worst layer | V, worst channel |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        cells = []
        for part in "kv":
            worst = max(own, key=lambda row: float(row[f"{part}_error"]))
            cells += [
                f"{statistics.fmean(row[f'{part}_error'] for row in own):.4f}",
                f"{worst[f'{part}_error']:.4f} (layer {worst['layer']})",
                f"{max(row[f'{part}_worst_channel'] for row in own):.3f}",
            ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def _shapes(document: dict[str, Any]) -> str:
    heading = f"### {document['what'][0].upper()}{document['what'][1:]}"
    return "\n".join([heading, "", _head(document), "", *_plain(document["rows"])]) + "\n"


def _plain(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(rows[0])
    lines = [f"| {' | '.join(column.replace('_', ' ') for column in columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in rows]


def main() -> None:
    """Write the tables into ``quality.md`` of the folder given on the command line."""
    docs = Path(sys.argv[1])
    page = docs / "quality.md"
    page.write_text(replace_section(page.read_text(), render(docs / "results" / "quality")))


if __name__ == "__main__":
    main()
