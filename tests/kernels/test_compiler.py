"""Kernels compiled ahead of time: what the key covers, what is compiled once, how a kernel is launched."""

import dataclasses
import re
import sys
import threading
import types

import pytest
import torch
import triton
from triton.compiler import ASTSource

from mjolnir.errors import ConfigurationError, KernelMissingError
from mjolnir.kernels.compiler import CACHE_STATS, KernelCache, launch
from tests.kernels.small_kernels import SM90, SM110, counts, gluon_variant, variant

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
