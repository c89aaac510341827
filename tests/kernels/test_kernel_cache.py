"""Kernels kept in a directory: what it survives, what it holds, and when it is too late to compile."""

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget

from mjolnir.errors import ConfigurationError, KernelMissingError
from mjolnir.kernels import compiler
from mjolnir.kernels.compiler import CACHE_STATS, KernelCache, KernelVariant, build_for
from tests.kernels.small_kernels import SM90, SM110, counts, gluon_variant, variant

ROOT = Path(__file__).parents[2]
# Another architecture than SM90 that this Triton can assemble for: 3.6's ptxas does not know Thor's.
OTHER, OTHER_NAME = (SM110, "sm_110a") if triton.__version__ >= "3.7" else (GPUTarget("cuda", 100, 32), "sm_100a")
SCRIPT = """
import os, sys
from pathlib import Path
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from mjolnir.kernels.compiler import KernelCache, KernelVariant
from mjolnir.kernels.shares import merge_kernel

arguments = (
    ("OUT", "*bf16"), ("SEQ_LENS", "*i32"), ("PART_O", "*fp16"), ("PART_ML", "*fp32"), ("LSE", "*fp32"),
    ("V_SCALE", "*fp32"), ("num_seqs", "i32"), ("programs", "i32"), ("scale_seq_stride", "i32"),
    ("scale_head_stride", "i32"),
)
constants = (
    ("OUT_TOKEN_STRIDE", 4096), ("OUT_HEAD_STRIDE", 128), ("KV_HEADS", 8), ("GROUP", 4), ("Q_LEN", 1), ("ROWS", 8),
    ("D", 128), ("TILE", 32), ("PACKED", False), ("CHANNEL_SCALES", False), ("WRITE_LSE", False), ("LEAST", 4),
    ("MAX_SEQS", 64), ("PDL", True), ("CHUNK", 64), ("PARTS", gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])),
    ("SEQS", gl.BlockedLayout([1], [32], [4], [0])),
)
environment = dict(os.environ)
cache = KernelCache(Path(sys.argv[1]))
cache.get(KernelVariant(merge_kernel, arguments, constants, "merge"), GPUTarget("cuda", 90, 32))
assert dict(os.environ) == environment
assert knobs.cache.dir == environment["TRITON_CACHE_DIR"]
assert "torch" not in sys.modules
print(cache.loads, cache.compiles)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("kernels") / "cache"
    KernelCache(directory).get(variant(), SM90)
    return directory


@pytest.fixture
def directory(filled: Path, tmp_path: Path) -> Path:
    """A directory of one's own in which `variant` is compiled for `SM90`."""
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def entry_of(directory: Path, wanted: KernelVariant | None = None) -> Path:
    return directory / (wanted or variant()).key(SM90)


class TestDirectory:
    def test_is_private_and_holds_one_folder_a_variant(self, directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert sorted(path.name for path in directory.iterdir()) == [variant().key(SM90)]
        assert stat.S_IMODE(entry_of(directory).stat().st_mode) == 0o700
        names = sorted(path.name for path in entry_of(directory).iterdir())
        assert names == ["manifest", "scaled.cubin", "scaled.json", "scaled.ptx"]

    def test_another_instance_loads(self, directory):
        """The directory is a copy: an entry does not depend on where it was compiled."""
        before = dict(CACHE_STATS)
        cache = KernelCache(directory)
        kernel = cache.get(variant(), SM90)
        assert counts(cache) == (1, 0)
        assert CACHE_STATS["loaded"] == before["loaded"] + 1
        assert CACHE_STATS["compiled"] == before["compiled"]
        fresh = KernelCache(None).get(variant(), SM90)
        assert kernel.asm["cubin"] == fresh.asm["cubin"]
        assert set(kernel.asm) == set(fresh.asm)
        left_out = {"hash"}  # Triton's own, of which we make no use
        assert {**kernel.metadata._asdict(), **dict.fromkeys(left_out)} == {
            **fresh.metadata._asdict(),
            **dict.fromkeys(left_out),
        }

    def test_another_process_loads_and_leaves_triton_s_own_directory_alone(self, tmp_path):
        own = tmp_path / "triton"
        environment = {**os.environ, "TRITON_CACHE_DIR": str(own)}
        outputs = [
            subprocess.run(
                [sys.executable, "-c", SCRIPT, str(tmp_path / "cache")],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for _ in range(2)
        ]
        assert outputs == ["0 1", "1 0"]
        assert not own.exists() or not list(own.rglob("*merge_kernel*"))

    def test_architectures_live_side_by_side(self, directory):
        cache = KernelCache(directory)
        here, there = cache.get(variant(), SM90), cache.get(variant(), OTHER)
        assert counts(cache) == (1, 1)
        assert (here.metadata.target, there.metadata.target) == (SM90, OTHER)
        assert here.asm["cubin"] != there.asm["cubin"]
        assert f".target {OTHER_NAME}" in there.asm["ptx"]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda entry: (entry / "scaled.cubin").write_bytes((entry / "scaled.cubin").read_bytes()[:1000]),
            lambda entry: (entry / "scaled.json").write_text((entry / "scaled.json").read_text()[:50]),
            lambda entry: (entry / "scaled.json").unlink(),
            lambda entry: (entry / "manifest").write_text("[1]"),
            lambda entry: (entry / "manifest").write_text("{}"),
        ],
        ids=["truncated cubin", "truncated json", "lost file", "foreign manifest", "empty manifest"],
    )
    def test_damaged_entry_is_compiled_again_and_mended(self, directory, damage, caplog):
        damage(entry_of(directory))
        cache = KernelCache(directory)
        with caplog.at_level(logging.WARNING):
            kernel = cache.get(variant(), SM90)
        assert counts(cache) == (0, 1)
        assert [str(entry_of(directory)) in message for message in caplog.messages] == [True]
        again = KernelCache(directory)
        assert again.get(variant(), SM90).asm["cubin"] == kernel.asm["cubin"]
        assert counts(again) == (1, 0)
        assert [path.name for path in directory.iterdir()] == [variant().key(SM90)]

    @pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["a file", "an empty folder"])
    def test_something_else_where_an_entry_belongs_is_replaced(self, tmp_path, make):
        make(entry_of(tmp_path))
        KernelCache(tmp_path).get(variant(), SM90)
        again = KernelCache(tmp_path)
        again.get(variant(), SM90)
        assert counts(again) == (1, 0)

    def test_faster_process_keeps_its_entry(self, directory, monkeypatch):
        before = (entry_of(directory) / "manifest").stat().st_ino
        cache = KernelCache(directory)
        monkeypatch.setattr(cache.store, "load", lambda key, source: None)  # looked before the other had finished
        cache.get(variant(), SM90)
        assert counts(cache) == (0, 1)
        assert (entry_of(directory) / "manifest").stat().st_ino == before
        assert cache.store.usable

    def test_file_instead_of_a_directory_costs_one_warning(self, tmp_path, caplog):
        path = tmp_path / "cache"
        path.write_text("not a directory")
        cache = KernelCache(path)
        with caplog.at_level(logging.WARNING):
            kernels = [cache.get(variant(), SM90), cache.get(variant(128), SM90)]
        assert counts(cache) == (0, 2)
        assert all(kernel.asm["cubin"].startswith(b"\x7fELF") for kernel in kernels)
        assert len(caplog.messages) == 1
        assert str(path) in caplog.messages[0]
        assert path.read_text() == "not a directory"

    @pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
    def test_directory_that_can_t_be_written_costs_one_warning_and_is_still_read(
        self, directory, number, monkeypatch, caplog
    ):
        write = Path.write_bytes

        def refuse(self, data):
            if self.is_relative_to(directory):
                write(self, data[:10])
                raise OSError(number, os.strerror(number))
            return write(self, data)

        monkeypatch.setattr(Path, "write_bytes", refuse)
        cache = KernelCache(directory)
        with caplog.at_level(logging.WARNING):
            cache.precompile([variant(), variant(128), variant(512)], SM90)
        assert counts(cache) == (1, 2)
        assert len(caplog.messages) == 1
        assert os.strerror(number) in caplog.messages[0]
        assert [path.name for path in directory.iterdir()] == [variant().key(SM90)]

    def test_building_ahead_fills_the_directory_for_another_architecture(self, tmp_path):
        kernels = build_for([variant(), gluon_variant()], OTHER, tmp_path / "kernels", workers=2)
        assert [kernel.metadata.target.arch for kernel in kernels] == [OTHER.arch] * 2
        cache = KernelCache(tmp_path / "kernels")
        cache.precompile([variant(), gluon_variant()], OTHER)
        assert counts(cache) == (2, 0)

    def test_building_ahead_is_told_of_a_directory_that_can_t_be_written(self, tmp_path):
        (tmp_path / "kernels").touch()
        with pytest.raises(ConfigurationError, match="a directory that can be written"):
            build_for([variant()], OTHER, tmp_path / "kernels")


class TestTooLate:
    def test_frozen_cache_serves_what_it_has_and_refuses_the_rest(self, directory):
        cache = KernelCache(directory)
        kernel = cache.get(variant(), SM90)
        cache.freeze()
        assert cache.get(variant(), SM90) is kernel
        with pytest.raises(KernelMissingError, match=r"frozen: scaled 512; call KernelCache.precompile"):
            cache.precompile([variant(), variant(512)], SM90)
        assert counts(cache) == (1, 0)

    def test_capture_refuses_what_is_not_in_memory(self, directory, monkeypatch):
        """Even what could be loaded: loading machine code onto a device may break the capture."""
        cache = KernelCache(directory)
        monkeypatch.setattr(compiler, "_capturing", lambda: True)
        with pytest.raises(KernelMissingError, match="stream capture began: scaled 256"):
            cache.get(variant(), SM90)
        monkeypatch.undo()
        kernel = cache.get(variant(), SM90)
        monkeypatch.setattr(compiler, "_capturing", lambda: True)
        assert cache.get(variant(), SM90) is kernel

    def test_error_is_a_runtime_error(self):
        assert issubclass(KernelMissingError, RuntimeError)
