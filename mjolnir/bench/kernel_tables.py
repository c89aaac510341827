"""The figures of docs/kernels.md: ``python -m mjolnir.bench.kernel_tables docs`` takes them from its result files."""

import json
import sys
from pathlib import Path
from typing import Any

from mjolnir.bench.kernel_cells import UNIFORM
from mjolnir.bench.kernel_rows import T5, geometric_mean

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def render(results: Path) -> str:
    """All tables, in Markdown.

    Args:
        results: folder of the result files of ``mjolnir bench kernel``.
    """
    return "\n".join(_section(json.loads(path.read_text())) for path in sorted(results.glob("*.json")))


def replace_section(page: str, content: str) -> str:
    """A page with the text between its marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def _section(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    ours = [row for row in document["rows"] if row["kernel"] == T5]
    compared = [row for row in ours if row.get("ratio") is not None]
    kind = (
        "best peer's time over T5's"
        if compared[0].get("best_peer") != "T5 over fp8"
        else "T5 over fp8's time over T5 over e2m3's"
    )
    batches = list(dict.fromkeys(row["batch"] for row in compared))
    lines = [
        f"`{document['command']}`, {document['date']}, {document['machine']}; {versions}. {kind[0].upper()}{kind[1:]},",
        "and in brackets the fraction of the speed of reading as many bytes:",
        "",
        f"| heads x head size, q_len | {' | '.join(batches)} |",
        f"|{'---|' * (len(batches) + 1)}",
    ]
    for shape, q_len in dict.fromkeys((row["shape"], row["q_len"]) for row in compared):
        cells = {row["batch"]: row for row in compared if (row["shape"], row["q_len"]) == (shape, q_len)}
        figures = (f"{cells[name]['ratio']:.2f} ({cells[name]['of_ceiling']:.2f})" for name in batches)
        lines.append(f"| {shape}, {q_len} | {' | '.join(figures)} |")
    lines.append("")
    names = {batch.name for batch in UNIFORM}
    for q_len in dict.fromkeys(row["q_len"] for row in compared):
        ratios = [row["ratio"] for row in compared if row["q_len"] == q_len and row["batch"] in names]
        ahead = sum(ratio > 1 for ratio in ratios)
        lines.append(
            f"q_len {q_len}: ahead in {ahead} of {len(ratios)} uniform cells, "
            f"geometric mean {geometric_mean(ratios):.2f}."
        )
    errors = ", ".join(f"{name} {_largest_error(document, name):.1e}" for name in _kernels(document))
    lines.append(f"Largest relative error against float32: {errors}.")
    return "\n".join(lines) + "\n"


def _kernels(document: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["kernel"] for row in document["rows"]))


def _largest_error(document: dict[str, Any], kernel: str) -> float:
    return max(float(row["relative_error"]) for row in document["rows"] if row["kernel"] == kernel)


def main() -> None:
    """Write the tables into ``kernels.md`` of the folder given on the command line."""
    docs = Path(sys.argv[1])
    page = docs / "kernels.md"
    page.write_text(replace_section(page.read_text(), render(docs / "results" / "kernels")))


if __name__ == "__main__":
    main()
