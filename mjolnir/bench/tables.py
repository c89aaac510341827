"""docs/results.md and the figures of docs/reliability.md: ``python -m mjolnir.bench.tables docs`` writes them.

They come from the files in ``docs/results``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from mjolnir.bench.cpu_decode import BASELINE, GOAL
from mjolnir.bench.kernel_tables import replace_section

HEADING = """# Figures

Generated from `docs/results/*.json` by `scripts/bench tables`; each part names the command that measures it again.
A ratio compares two things measured in turns in one run; a time on a CPU by itself says little about another machine.
"""


def render(results: Path) -> str:
    """The whole page, in Markdown.

    Args:
        results: folder of the result files.
    """
    paths = [*sorted(results.glob("*.json")), *sorted(results.glob("proxy/*.json"))]
    documents = [json.loads(path.read_text()) for path in paths]
    return "\n".join([HEADING, *map(_section, documents)])


def render_reliability(results: Path) -> str:
    """The figures of ``reliability.md``, in Markdown.

    Args:
        results: folder of the result files.
    """
    return "\n".join(_section(json.loads(path.read_text())) for path in sorted(results.glob("reliability/*.json")))


def _section(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    columns = list(dict.fromkeys(name for row in document["rows"] for name in row))
    lines = [
        f"## {document['what'][0].upper()}{document['what'][1:]}",
        "",
        f"`{document['command']}`, {document['date']}, {document['machine']}; {versions}.",
        "",
        *_verdict(document["rows"]),
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in document["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Where ratios stand against the goal, as the lines of a paragraph; none for a part without ratios."""
    ours = [row for row in rows if "ratio" in row and row.get("backend", BASELINE[0]) != BASELINE[0]]
    if not ours:
        return []
    above = [f"{row['streams']}x{row['context']} ({row['ratio']})" for row in ours if row["ratio"] > GOAL]
    if not above:
        return [f"Goal: a ratio of at most {GOAL}, which every case meets.", ""]
    missed = f"**Missed in {len(above)} of {len(ours)} cases**, streams x context (ratio): {', '.join(above)}."
    return [f"Goal: a ratio of at most {GOAL}. {missed}", ""]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    """Write ``results.md`` and ``reliability.md`` in the folder given on the command line."""
    docs = Path(sys.argv[1])
    (docs / "results.md").write_text(render(docs / "results"))
    page = docs / "reliability.md"
    page.write_text(replace_section(page.read_text(), render_reliability(docs / "results")))


if __name__ == "__main__":
    main()
