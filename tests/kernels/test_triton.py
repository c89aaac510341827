"""T5's Triton kernels against the float64 oracle: on a GPU, or in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so on a CPU this file runs in a process of its own, which
`test_interpreted.py` starts.
"""

import itertools
import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mjolnir.errors import ConfigurationError
from mjolnir.runner import RunnerConfig
from tests.kernels.decode_steps import LAYOUTS, SENTINEL, Case, Step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED,
    reason="needs a GPU or Triton's interpreter; tests/kernels/test_interpreted.py runs it there",
)

# f16 products of an f16 query with exact e4m3, f16 P; relative to the largest |V|. Largest seen: 8e-4.
ARITHMETIC = 2e-3
ARITHMETIC_LSE = 2e-3
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}


def runner_for(step: Step, num_sms: int | None = None):
    from mjolnir.kernels.runner import TritonRunner

    case = step.case
    config = RunnerConfig(
        num_heads=case.kv_heads * case.group,
        num_kv_heads=case.kv_heads,
        head_size=case.head_size,
        page_size=case.page_size,
        out_dtype=case.out_dtype,
        max_num_seqs=len(case.lengths),
        device=DEVICE,
        max_q_len=case.q_len,
        q_dtype="bf16",
    )
    runner = TritonRunner(config, num_sms=num_sms or case.num_sms)
    # What an earlier step has left in a workspace must never come out.
    runner._part_o.fill_(float("nan"))
    runner._part_ml.fill_(float("nan"))
    return runner


def attend(step: Step, runner=None, *, k_scale=1.0, v_scale=1.0, query=None, layout=None):
    """Output, with one sentinel row behind it, and LSE as (tokens, heads), both on the CPU."""
    case = step.case
    runner = runner or runner_for(step)
    query = (step.query if query is None else query).to(DEVICE)
    out = torch.full((query.shape[0] + 1, *query.shape[1:]), SENTINEL, dtype=case.out_dtype, device=DEVICE)
    lse = torch.full((len(case.lengths), case.kv_heads, case.q_len * case.group), SENTINEL, device=DEVICE)
    kv = step.cache(layout)
    kv = type(kv)(kv.k.to(DEVICE), kv.v.to(DEVICE))
    scales = [torch.as_tensor(scale, dtype=torch.float32, device=DEVICE) for scale in (k_scale, v_scale)]
    seq_lens, block_table = step.seq_lens.to(DEVICE), step.block_table.to(DEVICE)
    plan = runner.plan(seq_lens, block_table, q_len=case.q_len, causal=case.causal)
    runner.run(plan, query, out, kv, *scales, case.head_size**-0.5, lse=lse)
    assert bool((out[-1] == SENTINEL).all()), "wrote behind its rows"
    tokens = lse.view(len(case.lengths), case.kv_heads, case.q_len, case.group).transpose(1, 2)
    return out[:-1].cpu(), tokens.reshape(query.shape[:2]).cpu()


def assert_right(step: Step, out: torch.Tensor, lse: torch.Tensor, **scales) -> None:
    expected, expected_lse = step.oracle(step.query, **scales)
    largest = step.largest_value() * float(torch.as_tensor(scales.get("v_scale", 1.0)).abs().max())
    bound = ARITHMETIC * largest + HALF_ULP[step.case.out_dtype] * expected.abs()
    error = (out.double() - expected).abs()
    assert bool((error <= bound).all()), float((error - bound).max())
    dead = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead)
    errors = (lse.double() - expected_lse)[~dead].abs()
    assert float(errors.max() if errors.numel() else 0.0) <= ARITHMETIC_LSE


LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 300])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    q_len = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    return Case(
        lengths=tuple(length + q_len if length else 0 for length in draw(st.lists(LENGTHS, min_size=1, max_size=5))),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=group,
        head_size=draw(st.sampled_from([64, 64, 128, 256])),
        page_size=draw(st.sampled_from([16, 32, 64, 128])),
        q_len=q_len,
        causal=draw(st.booleans()),
        out_dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        layout=draw(st.sampled_from(LAYOUTS)),
        num_sms=draw(st.sampled_from([1, 3, 20])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40 if INTERPRETED else 60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
@example(Case(lengths=(0,), out_dtype=torch.bfloat16))
@example(Case(lengths=(0, 5, 0), num_sms=1, out_dtype=torch.bfloat16))
@example(Case(lengths=(700, *[40] * 6), kv_heads=1, num_sms=3, out_dtype=torch.bfloat16))
@example(Case(lengths=(90, 33), kv_heads=1, group=16, q_len=7, out_dtype=torch.bfloat16))
def test_agrees_with_the_oracle(case: Case) -> None:
    step = Step(case)
    assert_right(step, *attend(step))


def test_sequence_of_five_thousand_tokens() -> None:
    step = Step(Case(lengths=(5000, 3), kv_heads=1, group=4, page_size=128, out_dtype=torch.bfloat16))
    assert_right(step, *attend(step))


@pytest.mark.parametrize("num_sms", [1, 2, 7, 20, 132])
def test_any_number_of_programs_gives_the_same(num_sms: int) -> None:
    step = Step(Case(lengths=(300, 1, 130), q_len=2, num_sms=num_sms, out_dtype=torch.bfloat16))
    assert_right(step, *attend(step))


def test_plan_shares_the_tiles_equally() -> None:
    """One long sequence among short ones: every program has as many tiles as any other, but for one."""
    step = Step(Case(lengths=(900, *[64] * 10), kv_heads=2, num_sms=5, out_dtype=torch.bfloat16))
    runner = runner_for(step)
    runner.plan(step.seq_lens.to(DEVICE), step.block_table.to(DEVICE), q_len=1, causal=True)
    tile = runner.tuning.tile
    cumulative = runner._cum_tiles.tolist()
    assert cumulative == [0, *(torch.tensor([-(-n // tile) for n in step.case.lengths]).cumsum(0).tolist())]
    total = cumulative[-1] * 2
    starts = [total * program // min(total, runner.programs) for program in range(min(total, runner.programs) + 1)]
    shares = [end - begin for begin, end in itertools.pairwise(starts)]
    assert max(shares) - min(shares) <= 1
    for program, (seq, pair, first, count) in enumerate(runner._work.tolist()):
        if program >= len(shares):
            assert count == 0
            continue
        tiles = cumulative[seq + 1] - cumulative[seq]
        assert count == shares[program]
        assert 0 <= pair < 2
        assert 0 <= first < tiles
        assert cumulative[seq] * 2 + pair * tiles + first == starts[program]


def test_replan_follows_the_live_lengths() -> None:
    """A fused draft step: the lengths grow on the device, nothing is built again on the host."""
    step = Step(Case(lengths=(127, 300), out_dtype=torch.bfloat16))
    runner = runner_for(step)
    short = torch.tensor([3, 17], dtype=torch.int32, device=DEVICE)
    plan = runner.plan(short, step.block_table.to(DEVICE), q_len=1, causal=True)
    short.copy_(step.seq_lens)
    runner.replan(plan)
    query, out = step.query.to(DEVICE), torch.empty_like(step.query, device=DEVICE)
    kv, one = step.cache(), torch.ones(1, device=DEVICE)
    runner.run(plan, query, out, type(kv)(kv.k.to(DEVICE), kv.v.to(DEVICE)), one, one, step.case.head_size**-0.5)
    assert torch.equal(out.cpu(), attend(step, runner)[0])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=["tensor", "head", "sequence and head"])
def test_descales(shape: tuple[int, ...]) -> None:
    step = Step(Case(lengths=(200, 40), kv_heads=3, out_dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(1)
    scales = {name: torch.rand(shape, generator=generator) + 0.5 for name in ("k_scale", "v_scale")}
    assert_right(step, *attend(step, **scales), **scales)


def test_k_scale_of_zero_averages_the_values() -> None:
    step = Step(Case(lengths=(77,), out_dtype=torch.bfloat16))
    out, lse = attend(step, k_scale=0.0)
    assert_right(step, out, lse, k_scale=0.0)


def test_query_that_is_a_view_of_a_fused_qkv() -> None:
    step = Step(Case(lengths=(140, 17), group=3, q_len=2, out_dtype=torch.bfloat16))
    tokens, heads, size = step.query.shape
    fused = torch.full((tokens, (heads + 4) * size), float("nan"), dtype=torch.bfloat16)
    fused[:, : heads * size] = step.query.flatten(1)
    view = fused.to(DEVICE)[:, : heads * size].view(tokens, heads, size)
    assert_right(step, *attend(step, query=view))


def test_all_e4m3_bytes_come_through() -> None:
    """One key a sequence: its value is the output, whatever its byte."""
    for first in range(0, 256, 64):
        step = Step(Case(lengths=(1,), kv_heads=1, group=1, out_dtype=torch.float16))
        page, row = step.place(0, 0)
        codes = torch.arange(first, first + 64, dtype=torch.int32).to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        step.v[page, row, 0] = codes
        out, _ = attend(step)
        assert torch.equal(out[0, 0].float(), codes.view(torch.float8_e4m3fn).float())


def test_same_inputs_give_the_same_bits() -> None:
    step = Step(Case(lengths=(300, 65, 5), out_dtype=torch.bfloat16))
    first, first_lse = attend(step)
    again, again_lse = attend(step)
    assert torch.equal(first, again)
    assert torch.equal(first_lse, again_lse)


def test_refuses_an_fp8_query() -> None:
    from mjolnir.kernels.runner import TritonRunner

    config = RunnerConfig(4, 2, 64, 16, torch.bfloat16, 1, DEVICE, q_dtype="fp8")
    with pytest.raises(ConfigurationError, match="Q dtype fp8"):
        TritonRunner(config, num_sms=1)
