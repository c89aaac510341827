"""The series fits the Python tree of the wheel that Thor runs, which no laptop installs.

Needs that wheel (321 MB, kept in the cache folder and checked by hash). Without it and without a network
these tests fail: a series that was never tried on the image's tree must not look tested.
"""

import zipfile
from pathlib import Path

import pytest

from appliance import patchqueue, wheels
from appliance.patchformat import blob_id

QUEUE = Path(__file__).resolve().parents[2] / "patches"


@pytest.fixture(scope="module")
def queue() -> patchqueue.Queue:
    return patchqueue.load_queue(QUEUE)


@pytest.fixture(scope="module")
def wheel() -> Path:
    return wheels.fetch(wheels.upstream_wheel(QUEUE / "upstream.toml", "vllm"), print)


@pytest.fixture
def tree(wheel: Path, queue: patchqueue.Queue, tmp_path: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [*queue.paths(), "vllm-0.32.0.dist-info/METADATA"])
    return tmp_path


def test_the_wheel_has_the_texts_that_the_series_starts_from(tree: Path, queue: patchqueue.Queue) -> None:
    found = {path: blob_id((tree / path).read_bytes()) for path in queue.paths()}
    assert found == queue.ids_after(0)


def test_the_series_applies_to_the_wheel(tree: Path, queue: patchqueue.Queue) -> None:
    total, files = len(queue.patches), len(queue.paths())
    assert patchqueue.apply(tree, queue) == f"applied {total} of {total} patches: {files} files in {tree}"
    assert patchqueue.verify(tree, queue) == f"verified: {total} patches, {files} files in {tree}"
    for path in queue.paths():
        compile((tree / path).read_bytes(), path, "exec", dont_inherit=True)


def test_both_trees_end_up_the_same(tree: Path, queue: patchqueue.Queue) -> None:
    """One series serves the board and the laptop because the sources are the same; this is where it shows."""
    patchqueue.apply(tree, queue)
    shared = patchqueue.fit(patchqueue.find_root(), queue)
    assert patchqueue.read_tree(tree, shared) == patchqueue.read_tree(patchqueue.find_root(), shared)
