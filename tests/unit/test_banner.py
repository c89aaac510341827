"""The banner: drawn with its info block, shown once a process."""

import pytest

from mjolnir import __version__, banner


@pytest.fixture(autouse=True)
def not_shown_yet(monkeypatch):
    monkeypatch.setattr(banner, "_shown", [])


def test_drawing_with_the_model_beside_it():
    assert banner.banner("qwen3-8b").splitlines() == [
        "   ______________",
        "  |  |        |  |",
        f"  |  |  T5    |  |    Mjolnir v{__version__}",
        "  |__|________|__|    decode attention on T5 for vLLM",
        "        |##|          Model: qwen3-8b",
        "        |##|",
        "        |##|",
        "        [__]",
    ]


def test_drawing_without_a_model_has_no_model_line():
    text = banner.banner()
    assert "Model:" not in text
    assert f"Mjolnir v{__version__}" in text


def test_no_line_ends_in_blanks():
    assert all(line == line.rstrip() for line in banner.banner("x").splitlines())


def test_shown_once_a_process(backend_log):
    banner.show_once("first")
    banner.show_once("second")
    banner.show_once()
    assert [record.getMessage() for record in backend_log.records] == ["\n" + banner.banner("first")]
