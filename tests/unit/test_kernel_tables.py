"""The figures of docs/kernels.md are those of its result files."""

import json
from pathlib import Path

from mjolnir.bench import kernel_tables

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "results" / "kernels").glob("*.json"))


def test_page_is_generated_from_the_files() -> None:
    page = (DOCS / "kernels.md").read_text()
    content = kernel_tables.render(DOCS / "results" / "kernels")
    assert page == kernel_tables.replace_section(page, content), "run python -m mjolnir.bench.kernel_tables docs"


def test_files_name_what_was_measured() -> None:
    for path in FILES:
        document = json.loads(path.read_text())
        assert "NVIDIA" in document["machine"]
        assert document["versions"].keys() >= {"torch", "triton"}
        assert document["command"].startswith("mjolnir bench kernel")
    assert len(FILES) == 5


def test_a_16_bit_query_is_more_accurate_than_every_peer() -> None:
    """At most 3e-3 against float32, and less than any other kernel in the same run."""
    for path in FILES:
        rows = json.loads(path.read_text())["rows"]
        largest = {
            row["kernel"]: max(r["relative_error"] for r in rows if r["kernel"] == row["kernel"]) for row in rows
        }
        assert largest.pop("T5") <= min([3e-3, *largest.values()])
