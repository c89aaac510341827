"""Kernels compiled in processes of their own."""

import pickle
from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget

from mjolnir.kernels import apart
from mjolnir.kernels.apart import compile_apart
from mjolnir.kernels.compiler import KernelCache
from mjolnir.kernels.shipped import shipped_variants

SM90 = GPUTarget("cuda", 90, 32)


def smallest(count: int) -> list:
    """The variants that compile fastest: those of the packed cache and of merging."""
    found = [v for v in shipped_variants(90) if v.label.startswith(("merge", "write", "expand"))]
    return found[:count]


def test_a_variant_survives_the_way_to_another_process() -> None:
    for variant in shipped_variants(90):
        copy = pickle.loads(pickle.dumps(variant))  # noqa: S301  (what we pickled)
        assert copy == variant
        assert copy.label == variant.label


def test_a_cache_loads_what_processes_have_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "FEWEST", 2)
    variants = smallest(4)
    assert len(variants) == 4
    assert compile_apart(variants, tmp_path, SM90, processes=2) == 2
    cache = KernelCache(tmp_path)
    cache.precompile(variants, SM90)
    assert (cache.loads, cache.compiles) == (4, 0)
    assert compile_apart(variants, tmp_path, SM90, processes=2) == 0  # nothing is missing


def test_few_variants_or_no_directory_start_no_process(tmp_path: Path) -> None:
    variants = smallest(4)
    assert compile_apart(variants, tmp_path, SM90, processes=8) == 0
    assert compile_apart(shipped_variants(90), None, SM90, processes=8) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_fails_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apart, "FEWEST", 1)
    monkeypatch.setattr(apart, "_compile", len)  # takes one argument: raises in the process
    assert compile_apart(smallest(2), tmp_path, SM90, processes=2) == 2
    assert caplog.text.count("a process that compiled kernels failed: TypeError") == 2
