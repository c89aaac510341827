"""The probe's steps and its judgement, with an attention of the test's own in the place of FlashAttention 4.

That attention reads the same arguments by another way (token by token, in fp64), so that what it is given must be
what it says; each fault put into it must be seen.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from mjolnir import fa4_child
from mjolnir.fa4_child import Case

MIXED = Case("prompts and a decode", True, 16, (1, 40, 7), (70, 50, 7))


def attend(fault: str = "", **step: Any) -> None:
    """Paged causal attention, one query row at a time; ``fault`` is what to get wrong."""
    query, key, value, out = (step[name] for name in ("q", "k", "v", "out"))
    starts, seq_lens, table = (step[name].tolist() for name in ("cu_seqlens_q", "seqused_k", "block_table"))
    page, kv_heads = key.shape[1:3]
    group = query.shape[1] // kv_heads
    for request, seq_len in enumerate(seq_lens):
        rows = [(table[request][token // page], token % page) for token in range(seq_len)]
        if fault == "pages in order":
            rows = [(request * len(table[0]) + token // page, token % page) for token in range(seq_len)]
        pages, slots = (torch.tensor(part) for part in zip(*rows, strict=True))
        for head in range(query.shape[1]):
            kv_head = head % kv_heads if fault == "heads interleaved" else head // group
            scale = [
                1.0 if step[f"{name}_descale"] is None else float(step[f"{name}_descale"][request, kv_head])
                for name in "qkv"
            ]
            if fault in ("no k_descale", "no v_descale"):
                scale["qkv".index(fault[3])] = 1.0
            k, v = (part[pages, slots, kv_head].double() for part in (key, value))
            for row in range(starts[request], starts[request + 1]):
                last = seq_len - (starts[request + 1] - row) + (fault == "mask off by one")
                scores = k @ query[row, head].double() * scale[0] * scale[1] * step["softmax_scale"]
                position = torch.arange(seq_len)
                hidden = position > last
                if step["window_size"] is not None and fault != "no window":
                    hidden |= position < last - step["window_size"][0]
                scores = scores.masked_fill(hidden, float("-inf"))
                if step["s_aux"] is not None and fault != "no sinks":
                    weights = torch.cat((scores, step["s_aux"][head : head + 1].double())).softmax(0)[:-1]
                else:
                    weights = scores.softmax(0)
                out[row, head] = (weights @ v * scale[2]).to(out.dtype)
    if fault == "NaN":
        out[-1, -1, -1] = float("nan")
    if fault == "one row of zeros":
        out[0] = 0


def error(case: Case, head_size: int = 64, fault: str = "") -> float:
    inputs = fa4_child.build(case, head_size, "cpu")
    found = fa4_child.call(case, head_size, inputs, lambda **step: attend(fault, **step))
    return fa4_child.worst_error(case, found, fa4_child.expected(case, head_size, inputs))


@pytest.mark.parametrize(
    "case",
    [
        MIXED,
        Case("bf16", False, 128, (1, 40, 7), (70, 50, 7)),
        Case("decodes", True, 128, (1, 1, 1), (140, 33, 1)),
        Case("window and sinks", True, 16, (1, 30, 7), (130, 120, 7), windowed=True),
        Case("window and sinks", False, 128, (1, 30, 7), (130, 120, 7), windowed=True),
    ],
    ids=str,
)
def test_right_results_pass(case: Case) -> None:
    """What is left is the output's rounding to bf16."""
    assert error(case) < 4e-3


@pytest.mark.parametrize(
    "fault",
    ["no k_descale", "no v_descale", "pages in order", "heads interleaved", "mask off by one", "one row of zeros"],
)
def test_each_fault_is_seen(fault: str) -> None:
    assert error(MIXED, fault=fault) > 2 * fa4_child.LIMIT


@pytest.mark.parametrize("fault", ["no window", "no sinks"])
def test_each_fault_of_a_window_is_seen(fault: str) -> None:
    assert error(Case("", False, 16, (1, 30, 7), (130, 120, 7), windowed=True), fault=fault) > 2 * fa4_child.LIMIT


def test_p_in_e4m3_stays_below_the_limit() -> None:
    """The kernel rounds P to e4m3, with three bits of mantissa; that must not fail the probe."""
    case = Case("", True, 128, (1, 200, 37), (700, 333, 37))
    inputs = fa4_child.build(case, 128, "cpu")
    wanted = fa4_child.expected(case, 128, inputs)
    real = torch.Tensor.softmax

    def rounded(self: torch.Tensor, dim: int) -> torch.Tensor:
        return real(self * 1.0, dim=dim).mul(256).to(torch.float8_e4m3fn).float().div(256)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", rounded)
        found = fa4_child.expected(case, 128, inputs)
    assert 0.005 < fa4_child.worst_error(case, found, wanted) < 0.7 * fa4_child.LIMIT


def test_steps_by_head_size_and_page() -> None:
    """Both formats and pages; every kind of kernel: prompts beyond a tile, split decodes, short ones."""
    steps = fa4_child.cases(128, (16, 128))
    assert len(steps) == 12
    assert {(case.fp8, case.page) for case in steps} == {(fp8, page) for fp8 in (True, False) for page in (16, 128)}
    for case in steps:
        assert len(case.query_lens) == len(case.seq_lens) == 3
        assert all(q_len <= seq_len for q_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True))
    assert max(max(case.query_lens) for case in steps) > 128
    assert {case.query_lens for case in steps if "decodes" in case.name} == {(1, 1, 1)}
    # FlashAttention 4 splits from more than four tiles of 128 keys on.
    assert {max(case.seq_lens) > 512 for case in steps if "decodes" in case.name} == {True, False}
    assert {(case.fp8, case.page, case.windowed) for case in fa4_child.cases(256, (16, 128))} == {(False, 128, False)}


def test_descales_differ_by_head_and_are_not_one() -> None:
    descales = fa4_child.build(MIXED, 64, "cpu").descales
    assert descales is not None
    assert descales.shape == (3, 3, 2)
    assert descales.dtype == torch.float32
    assert (descales != 1).all()
    assert (descales[..., 0] != descales[..., 1]).all()


def test_arguments_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    inputs = fa4_child.build(MIXED, 64, "cpu")
    out = fa4_child.call(MIXED, 64, inputs, lambda **step: given.update(step))
    assert out.isnan().all(), "rows that the kernel leaves out must not look right"
    assert given["fa_version"] == 4
    assert given["k"].shape == given["v"].shape == (15, 16, 2, 64)
    assert given["k"].stride() == (2 * 16 * 128, 128, 16 * 128, 1), "K and V of a token lie side by side"
    assert given["q"].dtype == given["k"].dtype == torch.float8_e4m3fn
    assert given["out"].dtype == torch.bfloat16
    assert given["cu_seqlens_q"].tolist() == [0, 1, 41, 48]
    assert given["cu_seqlens_q"].dtype == given["block_table"].dtype == given["seqused_k"].dtype == torch.int32
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (40, 80)
    assert sorted(given["block_table"].flatten().tolist()) == list(range(15))


class Attention:
    """Answers every step with what is right, but for ``fault`` in the step of that number."""

    def __init__(self, fault: Any = None, number: int = 0) -> None:
        self.fault, self.left = fault, number

    def __call__(self, **step: Any) -> None:
        self.left -= 1
        if self.left == -1 and isinstance(self.fault, BaseException):
            raise self.fault


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (RuntimeError("illegal instruction\nmore"), "RuntimeError: illegal instruction"),
        (AssertionError(), "AssertionError: "),
        (None, "relative error nan, accepted below 0.05"),  # nothing was written
    ],
)  # fmt: skip
def test_the_first_failure_ends_the_probe(fault: Any, told: str) -> None:
    attention = Attention(fault)
    passed, detail = fa4_child.check(64, (128,), attention, "cpu")
    assert (passed, detail) == (False, f"prompts and a decode, fp8, page 128: {told}")
    assert attention.left == -1


@pytest.mark.parametrize("error", [ImportError("no quack"), torch.OutOfMemoryError("full")])
def test_what_is_no_verdict_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        fa4_child.check(64, (128,), Attention(error), "cpu")


def test_all_steps_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4_child, "cases", lambda head_size, pages: [MIXED])
    passed, detail = fa4_child.check(64, (16,), attend, "cpu")
    assert passed
    assert detail.startswith("1 steps, largest relative error 0.00")


def test_the_child_as_it_is_started() -> None:
    """Where no device is seen: a verdict that is not kept."""
    command = [sys.executable, "-P", "-m", "mjolnir.fa4_child", "128", "16", "128"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    (line,) = result.stdout.splitlines()
    told = json.loads(line.removeprefix(fa4_child.MARK))
    assert told == {"passed": False, "detail": "no CUDA device", "lasting": False}
