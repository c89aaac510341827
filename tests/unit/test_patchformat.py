"""Patch files: written as git writes them, applied to the one right text, and refused by line when malformed."""

from pathlib import Path

import pytest

from appliance.errors import PatchError
from appliance.patchformat import FilePatch, blob_id, parse_patch, render_diff

HEADER = b"""\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: Somebody <somebody@localhost>
Subject: [PATCH] one change

Why: because it spans
 two lines
Origin: here
---
"""
OLD = b"".join(b"line %d\n" % number for number in range(1, 31))
NEW = OLD.replace(b"line 25\n", b"line 25\nand a half\n")


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    path = tmp_path / "one.patch"
    path.write_bytes(HEADER + render_diff({"vllm/one.py": OLD}, {"vllm/one.py": NEW}))
    return path


def test_blob_id_is_gits() -> None:
    assert blob_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_patch_goes_in_and_comes_out(patch: Path) -> None:
    parsed = parse_patch(patch)
    assert parsed.header == HEADER
    assert parsed.changed_lines == 1
    assert parsed.apply({"vllm/one.py": OLD, "other": b""}) == {"vllm/one.py": NEW, "other": b""}
    assert parsed.revert({"vllm/one.py": NEW}) == {"vllm/one.py": OLD}


@pytest.mark.parametrize(("name", "value"), [("Why", "because it spans two lines"), ("Origin", "here"), ("Test", "")])
def test_header_fields(patch: Path, name: str, value: str) -> None:
    assert parse_patch(patch).field(name) == value


def test_a_change_refuses_any_other_text(patch: Path) -> None:
    other = OLD + b"one more line, far from the hunk\n"
    with pytest.raises(PatchError, match=f"one.py: expected blob {blob_id(OLD)}, found {blob_id(other)}"):
        parse_patch(patch).apply({"vllm/one.py": other})


def test_no_fuzz_and_no_offset(patch: Path) -> None:
    """The ids would refuse a shifted text first; the hunks must refuse it on their own too."""
    (file,) = parse_patch(patch).files
    for text in (b"a new first line\n" + OLD, OLD.replace(b"line 23\n", b"line 23 \n")):
        forged = FilePatch(file.path, blob_id(text), file.after, file.hunks)
        with pytest.raises(PatchError, match="the hunk for line 23 does not fit there"):
            forged.apply(text)


def test_hunks_must_give_the_promised_text(patch: Path) -> None:
    patch.write_bytes(patch.read_bytes().replace(b"+and a half", b"+and a third"))
    with pytest.raises(PatchError, match=f"the hunks give blob [0-9a-f]{{40}}, but the patch names {blob_id(NEW)}"):
        parse_patch(patch).apply({"vllm/one.py": OLD})


@pytest.mark.parametrize(
    ("old", "new", "hunks"),
    [
        (b"a\n", b"b\n", b"@@ -1 +1 @@\n-a\n+b\n"),
        (b"", b"a\nb\n", b"@@ -0,0 +1,2 @@\n+a\n+b\n"),
        (b"a\nb\n", b"", b"@@ -1,2 +0,0 @@\n-a\n-b\n"),
        (b"a\n", b"a", b"@@ -1 +1 @@\n-a\n+a\n\\ No newline at end of file\n"),
        (b"a\rb\n", b"a\rc\n", b"@@ -1 +1 @@\n-a\rb\n+a\rc\n"),
        # A line that fills a long file must stay usable as context.
        (b"a\n" + b"x\n" * 300, b"b\n" + b"x\n" * 300, b"@@ -1,4 +1,4 @@\n-a\n+b\n x\n x\n x\n"),
    ],
)
def test_diffs_are_written_as_git_writes_them(old: bytes, new: bytes, hunks: bytes, tmp_path: Path) -> None:
    head = f"index {blob_id(old)}..{blob_id(new)} 100644\n--- a/vllm/x.py\n+++ b/vllm/x.py\n".encode()
    diff = b"diff --git a/vllm/x.py b/vllm/x.py\n" + head + hunks
    assert render_diff({"vllm/x.py": old}, {"vllm/x.py": new}) == diff
    (tmp_path / "x.patch").write_bytes(HEADER + diff)
    parsed = parse_patch(tmp_path / "x.patch")
    assert parsed.apply({"vllm/x.py": old}) == {"vllm/x.py": new}
    assert parsed.revert({"vllm/x.py": new}) == {"vllm/x.py": old}


def corrupt(data: bytes, kind: str) -> bytes:
    lines = data.split(b"\n")
    at = next(index for index, line in enumerate(lines) if line.startswith(b"@@"))
    return {
        "truncated": b"\n".join(lines[: at + 4]) + b"\n",
        "cut": data[:-3],
        "counts": data.replace(lines[at], b"@@ -2,7 +2,1 @@"),
        "no hunk": b"\n".join(lines[:at]) + b"\n",
        "mailbox": data.replace(b"From 0", b"From: 0"),
        "subject": data.replace(b"Subject: ", b"Topic: "),
        "latin": data.replace(b"because", b"\xe9t\xe9"),
        "short ids": data.replace(lines[at - 3], b"index abc1234..def5678 100644"),
        "new file": data.replace(lines[at - 3], b"new file mode 100644\n" + lines[at - 3]),
        "rename": data.replace(b" b/vllm/one.py", b" b/vllm/uno.py"),
        "outside": data.replace(b"vllm/one.py", b"vllm/../one.py"),
        "not python": data.replace(b"vllm/one.py", b"vllm/one.txt"),
        "twice": data + b"\n".join(lines[at - 4 :]),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "line", "what"),
    [
        ("truncated", 17, "the file ends where a hunk line (3 old, 4 new to come) must be"),
        ("cut", 20, "the last line has no end; the file is truncated"),
        ("counts", 15, "the hunk has more lines than the 7 old and 1 new ones it names"),
        ("no hunk", 13, "the file ends where `@@ -LINE,COUNT +LINE,COUNT @@` must be"),
        ("mailbox", 1, "expected `From <40 hex digits> ...`: not a git mailbox"),
        ("subject", 1, "the header has no `Subject:`"),
        ("latin", 1, "the header is not UTF-8"),
        ("short ids", 10, "expected `index <40 hex>..<40 hex> 100644`"),
        ("new file", 10, "expected `index <40 hex>..<40 hex> 100644`"),
        ("rename", 9, "renames are outside this queue"),
        ("outside", 9, "vllm/../one.py is outside this queue: only .py files of vllm/"),
        ("not python", 9, "vllm/one.txt is outside this queue: only .py files of vllm/"),
        ("twice", 32, "vllm/one.py has two sections"),
    ],
)
def test_a_malformed_patch_names_file_line_and_fault(patch: Path, kind: str, line: int, what: str) -> None:
    patch.write_bytes(corrupt(patch.read_bytes(), kind))
    with pytest.raises(PatchError) as caught:
        parse_patch(patch)
    assert str(caught.value).startswith(f"{patch}:{line}: {what}")
    assert "\n" not in str(caught.value)


def test_unreadable_patch(tmp_path: Path) -> None:
    """Root reads any file, so the unreadable one is a link to itself."""
    patch = tmp_path / "loop.patch"
    patch.symlink_to(patch)
    with pytest.raises(PatchError, match=r"loop.patch: can't be read: Too many levels of symbolic links"):
        parse_patch(patch)
