"""Kernels compiled ahead of time: what the key covers, what the directory survives, when it is too late."""

import dataclasses
import errno
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mjolnir.errors import ConfigurationError, KernelMissingError
from mjolnir.kernels import compiler
from mjolnir.kernels.compiler import CACHE_STATS, KernelCache, KernelVariant, build_for, launch

SM90, SM110 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 110, 32)
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
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def scaled(source, target, n, factor, block: tl.constexpr, twice: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(source + at, mask=at < n) * factor
    tl.store(target + at, value * 2 if twice else value, mask=at < n)


@gluon.jit
def reversed_in_place(x, block: gl.constexpr, layout: gl.constexpr):
    at = gl.arange(0, block, layout=layout)
    gl.store(x + block - 1 - at, gl.load(x + at))


def variant(block: int = 256, twice: bool = False, **fields) -> KernelVariant:
    return KernelVariant(
        scaled,
        arguments=(("source", "*fp32"), ("target", "*fp32"), ("n", "i32"), ("factor", "fp32")),
        constants=(("block", block), ("twice", twice)),
        label=f"scaled {block}",
        **fields,
    )


def gluon_variant(per_thread: int = 1) -> KernelVariant:
    layout = gl.BlockedLayout([per_thread], [32], [4], [0])
    return KernelVariant(reversed_in_place, (("x", "*i32"),), (("block", 128), ("layout", layout)), "reversed")


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


def counts(cache: KernelCache) -> tuple[int, int]:
    return cache.loads, cache.compiles


class TestKey:
    @pytest.mark.parametrize(
        "other",
        [
            variant(block=512),
            variant(twice=True),
            variant(aligned=("source",)),
            variant(aligned=("source", "target")),
            variant(num_warps=8),
            variant(num_stages=3),
            variant(maxnreg=64),
            variant(launch_pdl=True),
            dataclasses.replace(variant(), constants=(("block", 256), ("twice", 0))),
            dataclasses.replace(
                variant(), arguments=(("source", "*fp32"), ("target", "*bf16"), ("n", "i32"), ("factor", "fp32"))
            ),
            gluon_variant(),
        ],
        ids=lambda other: other.label,
    )
    def test_differs_with_everything_that_machine_code_depends_on(self, other):
        assert other.key(SM90) != variant().key(SM90)

    def test_differs_with_the_target(self):
        assert variant().key(SM90) != variant().key(SM110)

    def test_differs_with_a_layout(self):
        assert gluon_variant(1).key(SM90) != gluon_variant(2).key(SM90)

    def test_differs_with_the_version_of_the_package(self, monkeypatch):
        before = variant().key(SM90)
        monkeypatch.setattr("mjolnir.__version__", "0.0.0")
        assert variant().key(SM90) != before

    def test_differs_with_a_variable_that_changes_code_generation(self, monkeypatch):
        before = variant().key(SM90)
        monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
        assert variant().key(SM90) != before

    def test_is_the_same_under_another_label_and_order_of_constants(self):
        other = dataclasses.replace(variant(), label="other", constants=(("twice", False), ("block", 256)))
        assert other.key(SM90) == variant().key(SM90)


class TestVariant:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"constants": (("block", 256),)}, "scaled's parameters"),
            ({"constants": (("block", 256), ("twice", False), ("MORE", 1))}, "scaled's parameters"),
            (
                {"arguments": (("target", "*fp32"), ("source", "*fp32"), ("n", "i32"), ("factor", "fp32"))},
                "arguments first",
            ),
            ({"aligned": ("block",)}, r"aligned \['block'\]: accepted: \('source'"),
            ({"constants": (("block", object()), ("twice", False))}, "block=<object"),
            ({"kernel": len}, "is not compiled"),
        ],
    )
    def test_refuses_what_would_not_compile_or_has_no_stable_key(self, fields, message):
        with pytest.raises(ConfigurationError, match=message):
            dataclasses.replace(variant(), **fields)

    def test_alignment_widens_loads(self):
        narrow, wide = KernelCache(None).precompile(
            [variant(num_warps=1), variant(num_warps=1, aligned=("source", "target", "n"))], SM90
        )
        assert "v4" not in narrow.asm["ptx"]
        assert "ld.global.v4" in wide.asm["ptx"]

    def test_numbers_are_arguments_whatever_their_values(self):
        """Triton's JIT compiles again for a 1 and for multiples of 16, inside a capture if need be."""
        ptx = KernelCache(None).get(variant(), SM90).asm["ptx"]
        parameters = re.findall(r"\.param \.(\S+) .*scaled_param_", ptx.split(".entry scaled(")[1].split(")")[0])
        assert parameters[2:4] == ["u32", "f32"]
        assert re.search(r"ld\.param\.b32\s+%r\d+, \[scaled_param_2\]", ptx)


class TestMemory:
    def test_second_get_is_the_same_kernel(self):
        cache = KernelCache(None)
        assert cache.get(variant(), SM90) is cache.get(variant(), SM90)
        assert counts(cache) == (0, 1)

    def test_precompile_keeps_the_order_and_compiles_equal_variants_once(self):
        cache = KernelCache(None)
        kernels = cache.precompile([variant(), gluon_variant(), variant()], SM90)
        assert [kernel.name for kernel in kernels] == ["scaled", "reversed_in_place", "scaled"]
        assert counts(cache) == (0, 2)

    def test_threads_compile_the_same_code(self):
        variants = [variant(block) for block in (128, 256, 512, 1024)]
        serial = KernelCache(None).precompile(variants, SM90)
        parallel = KernelCache(None).precompile(variants, SM90, workers=4)
        assert [kernel.asm["cubin"] for kernel in serial] == [kernel.asm["cubin"] for kernel in parallel]
        assert len({kernel.asm["cubin"] for kernel in serial}) == 4

    def test_one_thread_at_a_time_goes_from_python_to_ir(self, monkeypatch):
        """`ast.parse` of Python 3.11 fails where threads interrupt each other in it."""
        original, inside, seen = ASTSource.make_ir, threading.Lock(), []

        def make_ir(self, *args, **kwargs):
            seen.append(inside.acquire(blocking=False))
            try:
                # Gives every other thread the chance to come in.
                return original(self, *args, **kwargs)
            finally:
                if seen[-1]:
                    inside.release()

        monkeypatch.setattr(ASTSource, "make_ir", make_ir)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            KernelCache(None).precompile([variant(block) for block in (128, 256, 512, 1024)], SM90, workers=4)
        finally:
            sys.setswitchinterval(interval)
        assert seen == [True] * 4

    def test_counts_the_process(self):
        before = dict(CACHE_STATS)
        cache = KernelCache(None)
        cache.get(variant(), SM90)
        assert CACHE_STATS["compiled"] == before["compiled"] + 1
        assert CACHE_STATS["loaded"] == before["loaded"]
        assert CACHE_STATS["compile_seconds"] - before["compile_seconds"] == pytest.approx(cache.compile_seconds)
        assert cache.compile_seconds > 0


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


class TestLaunch:
    @pytest.fixture
    def compiled(self):
        """A kernel whose launcher writes down what it is given."""
        kernel = KernelCache(None).get(variant(), SM90)
        calls = []
        return calls, types.SimpleNamespace(
            name=kernel.name,
            src=kernel.src,
            function="function",
            packed_metadata=kernel.packed_metadata,
            run=lambda *places: calls.append(places),
            launch_metadata=lambda *places: ("metadata", *places),
        )

    def test_fills_the_grid_and_the_places_of_constants(self, compiled):
        calls, kernel = compiled
        launch(kernel, (7,), (1, 2, 3, 4.0), stream=5)
        assert calls == [(7, 1, 1, 5, "function", kernel.packed_metadata, None, None, None, 1, 2, 3, 4.0, None, None)]

    def test_hooks_are_called_when_there_are_any(self, compiled):
        calls, kernel = compiled
        hook = triton.knobs.runtime.launch_enter_hook
        hook.add(print)
        try:
            launch(kernel, (7, 8, 9), (1, 2, 3, 4.0), stream=5)
        finally:
            hook.remove(print)
        metadata = ("metadata", (7, 8, 9), 5, 1, 2, 3, 4.0, None, None)
        assert calls == [
            (7, 8, 9, 5, "function", kernel.packed_metadata, metadata, hook, None, 1, 2, 3, 4.0, None, None)
        ]

    @pytest.mark.parametrize("arguments", [(1, 2, 3), (1, 2, 3, 4.0, 5)])
    def test_wrong_number_of_arguments_is_refused(self, compiled, arguments):
        calls, kernel = compiled
        with pytest.raises(ConfigurationError, match=f"scaled: {len(arguments)} arguments: accepted: 4"):
            launch(kernel, (1,), arguments, stream=0)
        assert calls == []


@needs_gpu
class TestDevice:
    def test_results(self, tmp_path):
        source = torch.arange(1001, dtype=torch.float32, device="cuda")
        target = torch.full((1024,), -1.0, device="cuda")
        for cache in (KernelCache(tmp_path), KernelCache(tmp_path)):
            target.fill_(-1.0)
            launch(cache.get(variant(twice=True)), (4,), (source, target, 1001, 1.5))
            torch.testing.assert_close(target[:1001], source * 3)
            assert (target[1001:] == -1).all()
        assert counts(cache) == (1, 0)

    def test_gluon_results(self):
        x = torch.arange(128, dtype=torch.int32, device="cuda")
        launch(KernelCache(None).get(gluon_variant()), (1,), (x.data_ptr(),))
        assert x.tolist() == list(range(127, -1, -1))

    def test_capture_replays_and_refuses_a_missing_variant(self):
        cache = KernelCache(None)
        kernel = cache.get(variant(launch_pdl=True))
        source, target = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(kernel, (1,), (source, target, 256, 2.0))
            with pytest.raises(KernelMissingError, match="stream capture"):
                cache.get(variant(512))
        assert target.sum().item() == 0
        graph.replay()
        assert target.sum().item() == 512
