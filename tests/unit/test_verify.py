"""`mjolnir verify`: the cases cover what they say, right results pass, and a wrong one is found and named."""

import itertools
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from appliance import cli
from mjolnir.bench import verify, verify_cases
from mjolnir.layouts import detect_layout
from mjolnir.reference.attention import paged_attention
from mjolnir.runner import RunnerConfig, create_runner

CPU = torch.device("cpu")
CASES = verify_cases.covering()


class Wrapped:
    """The CPU's runner, with something done to its results."""

    def __init__(self, config: RunnerConfig, spoil) -> None:
        self._runner, self._spoil = create_runner(config), spoil
        self.config = config

    def plan(self, *arguments, **options):
        return self._runner.plan(*arguments, **options)

    def replan(self, plan) -> None:
        self._runner.replan(plan)

    def run(self, plan, query, out, kv, k_scale, v_scale, softmax_scale, lse=None) -> None:
        self._runner.run(plan, query, out, kv, k_scale, v_scale, softmax_scale, lse=lse)
        self._spoil(out, lse)


def run(monkeypatch, *words: str) -> int:
    """Exit code of `mjolnir` with these words."""
    monkeypatch.setattr(sys, "argv", ["mjolnir", *words])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_every_pair_of_values_occurs() -> None:
    assert len(CASES) == 60
    found = {
        pair
        for case in CASES
        for pair in itertools.combinations([(name, getattr(case, name)) for name in verify_cases.DIMENSIONS], 2)
    }
    wanted = itertools.combinations(verify_cases.DIMENSIONS.items(), 2)
    assert len(found) == sum(len(first[1]) * len(second[1]) for first, second in wanted) == 385


def test_lengths_hold_the_awkward_ones() -> None:
    assert all(0 in case.lengths and case.q_len <= min(filter(None, case.lengths)) for case in CASES)
    assert {case.num_kv_heads for case in CASES} == {1, 2, 3}
    single = [case for case in CASES if case.q_len == 1]
    assert all(1 in case.lengths for case in single)
    beside_a_page = {length - case.page_size for case in CASES for length in case.lengths}
    assert {-1, 0, 1} <= beside_a_page
    assert sum(verify_cases.LONG in case.lengths for case in CASES) == 15


@pytest.mark.parametrize("layout", verify_cases.DIMENSIONS["layout"])
def test_shape_of_a_layout(layout: str) -> None:
    assert detect_layout(verify.cache_shape(layout, 5, 3, 16, 64), 3, 16, 64) == layout


@pytest.mark.parametrize("case", [case for case in CASES if verify_cases.LONG not in case.lengths][:6], ids=str)
def test_reference_is_the_oracle(case: verify_cases.Case) -> None:
    step = verify.Step(case, CPU)
    out, lse = step.expected("bf16")
    expected, expected_lse = paged_attention(
        step.query,
        step.kv.k,
        step.kv.v,
        step.block_table,
        step.seq_lens,
        [case.q_len] * len(case.lengths),
        softmax_scale=case.head_size**-0.5,
        k_scale=step.k_scale,
        v_scale=step.v_scale,
        causal=case.causal,
    )
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-9)


def test_bytes_that_no_sequence_holds_are_nan() -> None:
    step = verify.Step(CASES[1], CPU)
    live = sum(CASES[1].lengths) * CASES[1].num_kv_heads * CASES[1].head_size
    for cache in (step.kv.k, step.kv.v):
        assert int((cache != verify.NAN_BYTE).sum()) == live


def test_the_cpu_passes() -> None:
    outcomes = list(verify.verify(CPU, cases=CASES[:12]))
    assert [outcome.fault for outcome in outcomes] == [""] * 12
    assert all(outcome.right for outcome in outcomes)
    assert 1e-5 < max(outcome.error for outcome in outcomes) < 4e-3  # what bf16 rounds away
    assert max(outcome.lse_error for outcome in outcomes) < 1e-5


def zero_a_head(out, lse) -> None:
    out[:-1, -1] = 0


def scale_slightly(out, lse) -> None:
    out[:-1] *= 1.02


def leave_a_nan(out, lse) -> None:
    out[0, 0, 0] = torch.nan


def spoil_without_an_lse(out, lse) -> None:
    if lse is None:
        out[:-1] = 0


def spoil_with_an_lse(out, lse) -> None:
    if lse is not None:
        out[:-1] *= torch.nan


def shift_the_lse(out, lse) -> None:
    if lse is not None:
        lse += 0.01


def make_an_empty_sequence_live(out, lse) -> None:
    if lse is not None:
        lse.nan_to_num_(neginf=0.0)


def write_behind(out, lse) -> None:
    out[-1] = 0


def fail(out, lse) -> None:
    raise RuntimeError("no such luck\nand more")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (zero_a_head, "relative error 1.0e+00"),
        (scale_slightly, "relative error 2."),
        (leave_a_nan, "relative error nan"),
        (spoil_without_an_lse, "relative error 1.0e+00"),
        (spoil_with_an_lse, "relative error nan"),
        (shift_the_lse, "LSE error 1.0e-02"),
        (make_an_empty_sequence_live, "LSE error inf"),
        (write_behind, "wrote behind its rows"),
        (fail, "RuntimeError: no such luck"),
    ],
)
def test_a_wrong_result_is_found(spoil, said: str) -> None:
    case = CASES[1]
    outcomes = list(verify.verify(CPU, lambda config: Wrapped(config, spoil), [case]))
    assert not outcomes[0].right
    lines = verify.summary(outcomes, CPU).splitlines()
    assert lines[0].startswith("0 of 1 cases right on CPU")
    assert lines[1].startswith(f"wrong: {case}: ")
    assert said in lines[1]
    assert len(lines) == 2


def test_command_on_a_cpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify, "covering", lambda: CASES[:3])
    assert run(monkeypatch, "verify", "--device", "cpu", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["device"], document["right"], len(document["cases"])) == ("CPU", True, 3)
    assert document["cases"][0]["relative_error"] < verify.LARGEST_ERROR
    assert run(monkeypatch, "verify", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "3 of 3 cases right on CPU; largest relative error" in printed
    assert printed.count(" right ") == 4


def test_command_with_a_broken_runner(monkeypatch) -> None:
    """Exit code 1, and the summary names the case."""
    monkeypatch.setattr(verify, "covering", lambda: CASES[:2])
    monkeypatch.setattr(verify, "t5_runner", lambda config: Wrapped(config, zero_a_head))
    result = CliRunner().invoke(cli.app, ["verify", "--device", "cpu"])
    assert result.exit_code == 1
    assert "0 of 2 cases right" in result.output
    assert f"wrong: {CASES[0]}: relative error 1.0e+00" in result.output


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("cuda", f"mjolnir: device 'cuda': PyTorch {torch.__version__} finds none; accepted: an NVIDIA GPU\n"),
        ("tpu", "mjolnir: device 'tpu': accepted: cuda, cpu\n"),
    ],
)
def test_no_usable_device_costs_one_line(monkeypatch, capsys, device: str, line: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "verify", "--device", device) == 2
    assert capsys.readouterr() == ("", line)


def test_a_gpu_that_is_too_old_costs_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert run(monkeypatch, "verify") == 2
    assert capsys.readouterr().err == (
        "mjolnir: device 'cuda': NVIDIA A100 has compute capability 8.0; accepted: 8.9 or newer\n"
    )


def test_without_pytorch_it_costs_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "mjolnir.bench.verify")
    monkeypatch.delattr("mjolnir.bench.verify")
    assert run(monkeypatch, "verify") == 2
    assert capsys.readouterr().err == "mjolnir: torch is not installed here; accepted: the Python of the engine\n"
