"""The self-test before serving: what passes, what is found, and what an engine does about it."""

import dataclasses

import pytest
import torch

from mjolnir import selftest
from mjolnir.errors import KernelMissingError
from mjolnir.reference.executor import TorchRunner
from mjolnir.runner import RunnerConfig

torch.set_num_threads(1)

CONFIG = RunnerConfig(
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    page_size=16,
    out_dtype=torch.bfloat16,
    max_num_seqs=4,
    device=torch.device("cpu"),
    max_q_len=3,
)


@pytest.fixture(autouse=True)
def nothing_tested_yet(monkeypatch):
    monkeypatch.setattr(selftest, "_outcomes", {})


def runner(**changes) -> TorchRunner:
    return TorchRunner(dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 256, "page_size": 128},
        {"kv_format": "e2m3"},
        {"q_dtype": "fp8"},
        {"q_dtype": "fp8", "kv_format": "e2m3", "page_size": 64},
        {"out_dtype": torch.float16},
        {"max_num_seqs": 1, "max_q_len": 1},
    ],
)
def test_sound_runner_passes(changes, token_major):
    outcome = selftest.run(runner(**changes), token_major)
    assert outcome.failure == ""
    # Every query length, causal, and all but the first with the other mask too.
    longest = changes.get("max_q_len", CONFIG.max_q_len)
    assert outcome.steps == 2 * longest - 1
    assert 1e-4 < outcome.error < (0.08 if changes.get("q_dtype") == "fp8" else 5e-3)


def test_tolerance_is_some_times_what_a_sound_runner_shows():
    for q_dtype, tolerance in selftest.TOLERANCE.items():
        error = selftest.run(runner(q_dtype=q_dtype, kv_format="e2m3"), False).error
        assert 2 * error < tolerance < 20 * error


class Unsound(TorchRunner):
    """A runner with one fault."""

    fault = ""

    def run(self, plan, query, out, kv, k_scale, v_scale, softmax_scale, lse=None):
        if self.fault == "scale of V":
            v_scale = torch.ones_like(v_scale)
        if self.fault == "raises":
            raise KernelMissingError("not compiled before a stream capture began: decode\nand more")
        super().run(plan, query, out, kv, k_scale, v_scale, softmax_scale, lse)
        if self.fault == "one element" and plan.q_len == 2:
            out[1, 3, 5] += 5
        if self.fault == "one row is NaN" and plan.q_len == 3:
            out[2, 0, 0] = torch.nan
        if self.fault == "a row not written":
            out[-1] = torch.nan
        if self.fault == "padding not zero":
            out[2 * plan.q_len] = 0.5

    def plan(self, seq_lens, block_table, *, q_len, causal):
        if self.fault == "mask":
            causal = True
        if self.fault == "last token missing":
            seq_lens = (seq_lens - 1).clamp_min(0)
        if self.fault == "another sequence's pages":
            block_table = block_table.flip(0)
        return super().plan(seq_lens, block_table, q_len=q_len, causal=causal)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("scale of V", "at q_len 1, 4 sequences"),
        ("one element", "at q_len 2, 4 sequences, not causal"),
        ("one row is NaN", "relative error nan at q_len 3, 4 sequences, not causal"),
        ("a row not written", "relative error nan at q_len 1, 4 sequences"),
        ("padding not zero", "at q_len 1, 4 sequences"),
        ("mask", "at q_len 2, 4 sequences, not causal"),
        ("last token missing", "at q_len 1, 4 sequences"),
        ("another sequence's pages", "at q_len 1, 4 sequences"),
    ],
)
def test_faults_are_found(monkeypatch, fault, where):
    monkeypatch.setattr(Unsound, "fault", fault)
    outcome = selftest.run(Unsound(CONFIG), False)
    assert outcome.failure.startswith("self-test failed: relative error ")
    assert outcome.failure.endswith(where)


def test_what_is_raised_is_a_failure_in_one_line(monkeypatch):
    monkeypatch.setattr(Unsound, "fault", "raises")
    assert selftest.run(Unsound(CONFIG), False).failure == (
        "self-test failed: KernelMissingError: not compiled before a stream capture began: decode"
    )


def test_once_a_process_for_each_configuration(monkeypatch):
    """vLLM makes every builder twice."""
    first = selftest.run(runner(), False)
    monkeypatch.setattr(Unsound, "fault", "raises")
    assert selftest.run(Unsound(CONFIG), False) is first
    assert selftest.run(Unsound(CONFIG), True).failure
    assert selftest.run(Unsound(dataclasses.replace(CONFIG, max_q_len=1)), False).failure


def test_both_ways_to_merge_are_tried(monkeypatch):
    """The CUDA kernels merge large batches in another way, by another variant."""

    class Shape:
        @staticmethod
        def merge_here(num_seqs):
            return num_seqs >= 7

    sizes = []

    class Recording(TorchRunner):
        shapes = {1: Shape()}  # noqa: RUF012

        def plan(self, seq_lens, block_table, *, q_len, causal):
            sizes.append((q_len, len(seq_lens)))
            return super().plan(seq_lens, block_table, q_len=q_len, causal=causal)

    config = dataclasses.replace(CONFIG, max_num_seqs=9, max_q_len=2)
    assert selftest.run(Recording(config), False).failure == ""
    assert sizes == [(1, 4), (1, 7), (2, 4), (2, 4)]


def test_pages_hold_nan_where_nobody_may_read():
    pages = selftest.random_pages(CONFIG, 4, 3, token_major=True)
    assert pages.seq_lens.tolist() == [300, 17, 0, 129]
    assert bool((pages.kv.k[0] == selftest.NAN_BYTE).all())
    last = int(pages.block_table[1, 1])
    assert bool((pages.kv.v[last, 1:] == selftest.NAN_BYTE).all())
    live = pages.kv.k[last, :1]
    assert bool(live.contiguous().view(torch.float8_e4m3fn).float().isfinite().all())
    assert int(pages.block_table[2].abs().sum()) == 0


def test_layout_is_the_caches():
    major = selftest.random_pages(CONFIG, 2, 1, token_major=True).kv.fused
    minor = selftest.random_pages(CONFIG, 2, 1, token_major=False).kv.fused
    assert torch.equal(major, minor)
    assert major.stride() == (16 * 2 * 128, 128, 2 * 128, 1)
    assert minor.stride() == (16 * 2 * 128, 16 * 128, 128, 1)
