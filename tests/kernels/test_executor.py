"""The CPU executor of T5 against the float64 oracle: numbers, who sees which key, descales.

Beside the bounds of `tests.kernels.executor_bounds` there is `Q_ROUNDING`, when the oracle is given the query as it
came: the three mantissa bits of e4m3, for data of unit variance and sequences of at least a tile (shorter ones average
less).
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.decode_steps import LAYOUTS, NAN_BYTE, Case, Step
from tests.kernels.executor_bounds import assert_arithmetic

torch.set_num_threads(1)

Q_ROUNDING = 5e-2  # largest of 300 random cases: 3.8e-2
Q_ROUNDING_LSE = 4e-2  # largest of the same: 3.2e-2


def assert_q_rounding(step: Step, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Output and LSE are near what an unrounded query gives."""
    expected, expected_lse = step.oracle(step.query)
    live = expected_lse != -math.inf
    assert float((out.double() - expected).abs().max()) <= Q_ROUNDING
    errors = (lse.double() - expected_lse)[live].abs()
    assert float(errors.max() if errors.numel() else 0.0) <= Q_ROUNDING_LSE


def lengths_of(page_size: int):
    """Lengths at the edges of pages, of tiles and of groups of 16 tokens, and padding."""
    edges = [0, 1, 2, 15, 16, 17, page_size - 1, page_size, page_size + 1, 127, 128, 129, 255, 256, 257, 1000]
    return st.lists(st.sampled_from(edges), min_size=1, max_size=5).map(tuple)


@st.composite
def cases(draw):
    page_size = draw(st.sampled_from([16, 32, 64, 128]))
    group = draw(st.sampled_from([1, 2, 3, 6, 8, 16]))
    return Case(
        lengths=draw(lengths_of(page_size)),
        kv_heads=draw(st.sampled_from([1, 2, 4] if group <= 3 else [1, 2])),
        group=group,
        head_size=draw(st.sampled_from([64, 128, 256])),
        page_size=page_size,
        q_len=draw(st.integers(1, 8)),
        causal=draw(st.booleans()),
        q_dtype=draw(st.sampled_from(["fp8", "bf16"])),
        out_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        layout=draw(st.sampled_from(LAYOUTS)),
        max_splits=draw(st.sampled_from([1, 2, 5, 16])),
        num_sms=draw(st.sampled_from([1, 20, 132])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(deadline=None, max_examples=120)
@given(case=cases())
@example(case=Case(lengths=(1000,), q_len=8, group=16, head_size=256, page_size=128))
@example(case=Case(lengths=(0, 0), q_len=3))
@example(case=Case(lengths=(1, 1000, 0, 129, 16), num_sms=132, q_len=4, layout="2BHND"))
@example(case=Case(lengths=(2, 3, 1), q_len=5, group=3))  # shorter than the query: the first rows see no key
def test_any_step_is_the_oracles(case):
    step = Step(case)
    out, lse = step.run()
    assert_arithmetic(step, out, lse)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 8, 16])
def test_rounding_the_query_to_e4m3_costs_little(head_size, group):
    step = Step(Case(lengths=(127, 128, 600), head_size=head_size, group=group, q_len=3, seed=head_size + group))
    assert_q_rounding(step, *step.run())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 130, 259, 261, 1000])
@pytest.mark.parametrize("page_size", [16, 128])
def test_lengths_at_the_edges(length, page_size):
    step = Step(Case(lengths=(length,), page_size=page_size, seed=length))
    assert_arithmetic(step, *step.run())


def test_one_token_beside_a_long_sequence():
    step = Step(Case(lengths=(1, 20_000, 17), kv_heads=1, group=1, num_sms=132))
    assert_arithmetic(step, *step.run())


def test_padding_gives_zero_and_no_lse():
    step = Step(Case(lengths=(0, 33, 0), q_len=2))
    out, lse = step.run()
    rows = torch.tensor([True, True, False, False, True, True])
    assert bool((out[rows] == 0).all())
    assert bool((lse[rows] == -math.inf).all())
    assert bool((out[~rows] != 0).all())


# Who sees which key.


def test_a_causal_row_sees_its_own_key_and_none_after_it():
    case = Case(lengths=(300,), q_len=4, q_dtype="bf16")
    before, _ = Step(case).run()
    for row in range(4):
        changed = Step(case)
        page, token = changed.place(0, 300 - 4 + row)
        changed.v[page, token] = 0x7E  # 448 in every element
        after, _ = changed.run()
        differs = (after != before).flatten(1).any(1).tolist()
        assert differs == [other >= row for other in range(4)]


def test_every_non_causal_row_sees_the_last_key():
    case = Case(lengths=(300,), q_len=4, causal=False)
    before, _ = Step(case).run()
    changed = Step(case)
    page, token = changed.place(0, 299)
    changed.v[page, token] = 0x7E
    after, _ = changed.run()
    assert bool((after != before).flatten(1).all())


@pytest.mark.parametrize("lengths", [(1,), (257, 16, 1000), (0, 5)])
def test_causality_is_nothing_to_one_query_token(lengths):
    case = Case(lengths=lengths)
    causal, causal_lse = Step(case).run()
    other, other_lse = Step(dataclasses.replace(case, causal=False)).run()
    assert torch.equal(causal, other)
    assert torch.equal(causal_lse, other_lse)


@pytest.mark.parametrize("max_splits", [1, 16])
@pytest.mark.parametrize("half", ["k", "v"])
def test_nan_in_a_live_row_stays_in_its_sequence_and_head(half, max_splits):
    step = Step(Case(lengths=(200, 700, 50), kv_heads=2, group=2, max_splits=max_splits))
    page, token = step.place(1, 150)
    getattr(step, half)[page, token, 1] = NAN_BYTE
    out, lse = step.run()
    nan = out.isnan().any(-1)
    assert nan.tolist() == [[False] * 4, [False, False, True, True], [False] * 4]
    if half == "k":
        assert torch.equal(lse.isnan(), nan)


@pytest.mark.parametrize("q_dtype", ["fp8", "bf16"])
def test_nan_in_the_query_stays_in_its_sequence_and_head(q_dtype):
    step = Step(Case(lengths=(20, 30), kv_heads=2, group=2, q_dtype=q_dtype))
    step.query[1, 0] = math.nan
    out, _ = step.run()
    assert out.isnan().any(-1)[0].tolist() == [False] * 4
    assert out.isnan().any(-1)[1, 2:].tolist() == [False] * 2
    assert out[1, 0].isnan().all()


@pytest.mark.parametrize("max_splits", [1, 16])
@pytest.mark.parametrize("half", ["k", "v"])
def test_nan_in_a_later_key_does_not_reach_an_earlier_row(half, max_splits):
    """A draft token that the model made NaN must not spoil the verification of those before it."""
    step = Step(Case(lengths=(300,), q_len=4, max_splits=max_splits))
    page, token = step.place(0, 298)  # the third row's own key
    getattr(step, half)[page, token] = NAN_BYTE
    out, _ = step.run()
    assert out.isnan().flatten(1).any(1).tolist() == [False, False, True, True]


# Descales.


@pytest.mark.parametrize("length", [40, 1000])
def test_descales_of_every_shape(length):
    step = Step(Case(lengths=(length, 17, 129), kv_heads=2, group=3))
    k_scales = torch.tensor([[0.5, 2.0], [1.0, 0.25], [3.0, 1.5]])
    v_scales = torch.tensor([[2.0, 0.125], [1.0, 4.0], [0.5, 1.0]])
    for k_scale, v_scale in [
        (k_scales[0, 0], v_scales[0, 0]),
        (k_scales[0, :1], v_scales[0, :1]),
        (k_scales[1], v_scales[1]),
        (k_scales, v_scales),
        (k_scales[0, 1], v_scales),
        (k_scales, v_scales[2]),
    ]:
        out, lse = step.run(k_scale=k_scale, v_scale=v_scale)
        assert_arithmetic(step, out, lse, k_scale=k_scale, v_scale=v_scale)


def test_descales_of_equal_values_give_equal_bits():
    step = Step(Case(lengths=(300, 17, 129)))
    results = [
        step.run(k_scale=torch.full(shape, 0.75), v_scale=torch.full(shape, 1.25)) for shape in [(), (1,), (2,), (3, 2)]
    ]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("lengths", [(1000,), (5, 64, 129)])
@pytest.mark.parametrize("causal", [True, False])
def test_k_descale_of_zero_averages_the_values(lengths, causal):
    """The reference gave NaN: a mask of -inf times 0."""
    step = Step(Case(lengths=lengths, q_len=2, causal=causal))
    out, lse = step.run(k_scale=0.0)
    assert_arithmetic(step, out, lse, k_scale=0.0)
    if not causal:
        torch.testing.assert_close(lse, torch.tensor(lengths).log().repeat_interleave(2)[:, None].expand(lse.shape))


def test_query_of_zeros_averages_the_values():
    step = Step(Case(lengths=(100,)))
    step.query.zero_()
    out, lse = step.run()
    assert_arithmetic(step, out, lse)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(100)))


@pytest.mark.parametrize("q_dtype", ["fp8", "bf16"])
def test_query_outlier_changes_its_own_sequence_and_head_only(q_dtype):
    step = Step(Case(lengths=(90, 90), kv_heads=2, group=2, q_dtype=q_dtype))
    before, _ = step.run()
    step.query[0, 1, 5] = 1e4
    after, _ = step.run()
    same = (after == before).all(-1)
    # In e4m3 the heads of one KV head share a descale, so the outlier coarsens its neighbour.
    assert same.tolist() == [[q_dtype == "bf16", False, True, True], [True] * 4]
    assert not after.isnan().any()


@pytest.mark.parametrize("peak", [8.0, 60.0])
def test_one_key_that_takes_all_weight(peak):
    """In bf16, so that the score is what it is said to be."""
    step = Step(Case(lengths=(1000,), kv_heads=1, group=1, q_dtype="bf16"))
    page, token = step.place(0, 700)
    key = step.k.view(torch.float8_e4m3fn)[page, token, 0].float()
    step.query[0, 0] = (peak * 8.0 * key / key.square().sum()).to(torch.bfloat16)  # 8 is the root of the head size
    out, lse = step.run()
    assert_arithmetic(step, out, lse)
    if peak == 60.0:
        value = step.v.view(torch.float8_e4m3fn)[page, token, 0].float()
        torch.testing.assert_close(out[0, 0], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_scores_that_rise_or_fall_over_the_sequence(order):
    """The maximum moves in every tile, or never after the first."""
    step = Step(Case(lengths=(1000,), kv_heads=1, group=1, q_dtype="bf16"))
    ramp = torch.linspace(-4, 4, 1000) * order
    for token, value in enumerate(ramp.tolist()):
        page, row = step.place(0, token)
        step.k[page, row, 0] = torch.full((64,), value).to(torch.float8_e4m3fn).view(torch.uint8)
    step.query.fill_(0.5)
    out, lse = step.run()
    assert_arithmetic(step, out, lse)
