"""Compile caches that are put aside."""

import os
from pathlib import Path

import pytest

from appliance import caches


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    names = dict(zip(caches.VARIABLES, ("vllm", "triton", "inductor"), strict=True))
    for folder in ("vllm", "triton"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / "kernel").write_text(folder)
    return {name: str(tmp_path / folder) for name, folder in names.items()}


def test_those_that_hold_something_go_aside_and_one_old_one_is_kept(environment, tmp_path):
    assert caches.folders(environment) == [tmp_path / "vllm", tmp_path / "triton"]
    assert caches.rotate(environment) == [tmp_path / "vllm", tmp_path / "triton"]
    assert caches.folders(environment) == []
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "second").write_text("2")
    assert caches.rotate(environment) == [tmp_path / "vllm"]
    assert sorted(os.listdir(tmp_path)) == ["triton.old", "vllm.old"]
    assert os.listdir(tmp_path / "vllm.old") == ["second"]
    assert (tmp_path / "triton.old" / "sub" / "kernel").read_text() == "triton"


def test_a_folder_that_can_not_be_renamed_away_is_emptied_in_place(environment, tmp_path):
    """A link stands for a mounted volume, which gives the same: its content goes into a folder of its own."""
    (tmp_path / "vllm").rename(tmp_path / "volume")
    (tmp_path / "vllm").symlink_to(tmp_path / "volume")
    for _ in range(2):
        assert tmp_path / "vllm" in caches.rotate(environment)
        assert os.listdir(tmp_path / "volume") == [".old"]
        (tmp_path / "vllm" / "next").write_text("n")
    assert os.listdir(tmp_path / "volume" / ".old") == ["next"]


def test_nothing_set_and_nothing_there():
    assert caches.rotate({"VLLM_CACHE_ROOT": "/nowhere/at/all", "TRITON_CACHE_DIR": ""}) == []


def test_a_folder_that_can_not_be_put_aside_is_passed_over(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert caches.rotate(environment) == []
    assert (tmp_path / "vllm" / "sub" / "kernel").exists()
