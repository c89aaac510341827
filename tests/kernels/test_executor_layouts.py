"""The CPU executor of T5 over caches, queries and outputs of any layout and strides."""

import math

import pytest
import torch

from mjolnir.layouts import PagedKV, split_kv
from mjolnir.reference.executor import TorchRunner
from tests.kernels.decode_steps import LAYOUTS, NAN_BYTE, SENTINEL, Case, Step, in_layout
from tests.kernels.executor_bounds import assert_arithmetic

torch.set_num_threads(1)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_all_layouts_give_equal_bits(page_size, kv_heads):
    step = Step(Case(lengths=(300, 1, 129), kv_heads=kv_heads, page_size=page_size, q_len=2))
    results = [step.run(kv=step.cache(layout)) for layout in LAYOUTS]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    assert_arithmetic(step, *results[0])


def token_major(step: Step) -> PagedKV:
    """vLLM's logical (B, H, N, C) over memory in which the heads of a token lie side by side."""
    both = torch.cat([step.k, step.v], dim=-1).contiguous()
    return split_kv(both.transpose(1, 2), "BHN2D", step.row)


def between_layers(step: Step) -> PagedKV:
    """A page of every layer one after the other: pages lie far apart, and the cache does not begin at 0."""
    both = in_layout(step.k, step.v, "BHN2D")
    memory = torch.full((both.shape[0], 3, *both.shape[1:]), NAN_BYTE, dtype=torch.uint8)
    memory[:, 1] = both
    return split_kv(memory[:, 1], "BHN2D", step.row)


def heads_first_of_all(step: Step) -> PagedKV:
    """All pages of a head before the next head's."""
    both = in_layout(step.k, step.v, "BHN2D")
    memory = both.transpose(0, 1).contiguous()
    return split_kv(memory.transpose(0, 1), "BHN2D", step.row)


def padded_pages(step: Step) -> PagedKV:
    """Pages with a tail whose size is no multiple of anything."""
    both = in_layout(step.k, step.v, "BHN2D")
    flat = torch.full((both.shape[0], both[0].numel() + 40), NAN_BYTE, dtype=torch.uint8)
    flat[:, :-40] = both.flatten(1)
    strides = (flat.stride(0), *both.stride()[1:])
    return split_kv(flat.as_strided(both.shape, strides), "BHN2D", step.row)


STRIDED = [token_major, between_layers, heads_first_of_all, padded_pages]


@pytest.mark.parametrize("arrange", STRIDED)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_any_strides_give_equal_bits(arrange, kv_heads):
    step = Step(Case(lengths=(300, 1, 129), kv_heads=kv_heads))
    out, lse = step.run()
    strided_out, strided_lse = step.run(kv=arrange(step))
    assert torch.equal(strided_out, out)
    assert torch.equal(strided_lse, lse)


def test_layers_of_one_step_may_differ_in_their_strides():
    """A plan keeps indices that depend on the strides; one layer's must not be used for another's."""
    step = Step(Case(lengths=(300, 40)))
    runner = TorchRunner(step.case.config(), num_sms=step.case.num_sms)
    plan = runner.plan(step.seq_lens, step.block_table, q_len=1, causal=True)
    alone = step.run()[0]
    for kv in [step.cache(), *(arrange(step) for arrange in STRIDED), step.cache("2BNHD"), step.cache()]:
        assert torch.equal(step.run(kv=kv, plan=plan, runner=runner)[0], alone)


def test_query_that_is_a_view_of_a_fused_qkv():
    step = Step(Case(lengths=(300, 17), kv_heads=2, group=3, q_len=2))
    tokens, heads, size = step.query.shape
    fused = torch.full((tokens, (heads + 4) * size), math.nan, dtype=torch.bfloat16)
    fused[:, : heads * size] = step.query.flatten(1)
    view = fused[:, : heads * size].view(tokens, heads, size)
    assert not view.is_contiguous()
    out, lse = step.run(query=view)
    contiguous_out, contiguous_lse = step.run()
    assert torch.equal(out, contiguous_out)
    assert torch.equal(lse, contiguous_lse)


@pytest.mark.parametrize("q_dtype", ["fp8", "bf16"])
def test_float16_model(q_dtype):
    """The reference handed float16 bytes to a kernel for bf16."""
    step = Step(Case(lengths=(300, 17), q_len=2, q_dtype=q_dtype, out_dtype=torch.float16))
    step.query = step.query.to(torch.float16)
    assert_arithmetic(step, *step.run())


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("length", [20, 1000])
def test_rows_behind_the_step_are_not_touched(q_len, length):
    """A batch padded for a CUDA graph: the buffers are larger than the step."""
    step = Step(Case(lengths=(length, length), q_len=q_len))
    runner = TorchRunner(step.case.config())
    plan = runner.plan(step.seq_lens, step.block_table, q_len=q_len, causal=True)
    rows = len(step.query)
    query = torch.cat([step.query, torch.full_like(step.query, math.nan)])
    memory = torch.full((2 * rows, 2 * step.query.shape[1], 64), SENTINEL)
    out = memory[:, ::2]  # strided as well
    scale = torch.ones(())
    runner.run(plan, query, out, step.cache(), scale, scale, 0.125)
    assert bool((memory[rows:] == SENTINEL).all())
    assert bool((memory[:rows, 1::2] == SENTINEL).all())
    assert_arithmetic(step, out[:rows], None)
