"""The CPU executor's plans, and the interface that every runner has."""

import dataclasses

import pytest
import torch

from mjolnir.errors import ConfigurationError
from mjolnir.reference.executor import TorchRunner
from mjolnir.runner import create_runner, query_tile_rows
from tests.kernels.decode_steps import Case, Step
from tests.kernels.executor_bounds import ARITHMETIC, ARITHMETIC_LSE, assert_arithmetic

torch.set_num_threads(1)


@pytest.mark.parametrize("q_len", [1, 4])
def test_number_of_splits_does_not_change_the_result(q_len):
    step = Step(Case(lengths=(2048, 300), kv_heads=1, q_len=q_len, num_sms=132))
    expected, used = None, set()
    for max_splits in range(1, 17):
        case = dataclasses.replace(step.case, max_splits=max_splits)
        runner = TorchRunner(case.config(), num_sms=case.num_sms)
        plan = runner.plan(step.seq_lens, step.block_table, q_len=q_len, causal=True)
        used.add(plan.splits.n_splits)
        out, lse = step.run(plan=plan, runner=runner)
        expected = expected or (out, lse)
        # Both sides round: twice the bound of one.
        assert float((out - expected[0]).abs().max()) <= 2 * ARITHMETIC * step.largest_value()
        assert float((lse - expected[1]).abs().max()) <= 2 * ARITHMETIC_LSE
    assert {max(splits) for splits in used} == {1, 2, 3, 4, 6, 8, 16}  # the plans did differ


def test_same_inputs_give_the_same_bits():
    step = Step(Case(lengths=(1000, 17, 300), q_len=2, num_sms=132))
    first, second = step.run(), step.run()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_order_of_pages_in_memory_is_nothing():
    step = Step(Case(lengths=(300, 129), page_size=32))
    out, lse = step.run()
    order = torch.randperm(len(step.k), generator=torch.Generator().manual_seed(1))
    step.k, step.v = step.k[order], step.v[order]
    place = torch.argsort(order)
    live = (step.block_table >= 0) & (step.block_table < len(order))
    step.block_table[live] = place[step.block_table[live].long()].to(torch.int32)
    moved_out, moved_lse = step.run()
    assert torch.equal(moved_out, out)
    assert torch.equal(moved_lse, lse)


def test_sequences_may_share_pages():
    step = Step(Case(lengths=(64, 64)))
    step.block_table[1] = step.block_table[0]
    step.query[1] = step.query[0]
    out, _ = step.run()
    assert torch.equal(out[0], out[1])
    assert_arithmetic(step, out, None)


def test_plan_is_that_of_the_planner_for_a_thor():
    config = Case(lengths=(4096,), kv_heads=4, group=4).config()
    plan = TorchRunner(config, num_sms=20).plan(
        torch.tensor([4096]), torch.zeros((1, 256), dtype=torch.int32), q_len=1, causal=True
    )
    assert (plan.splits.slots, plan.splits.chunk, plan.splits.n_splits) == (10, 4, (8,))


def test_replan_leaves_a_plan_as_it_is():
    step = Step(Case(lengths=(300,)))
    runner = TorchRunner(step.case.config())
    plan = runner.plan(step.seq_lens, step.block_table, q_len=1, causal=True)
    before = step.run(plan=plan, runner=runner)[0]
    runner.replan(plan)
    assert torch.equal(step.run(plan=plan, runner=runner)[0], before)


# The interface.


def test_cpu_gets_this_runner():
    config = Case(lengths=(1,)).config()
    runner = create_runner(config)
    assert isinstance(runner, TorchRunner)
    assert runner.config is config
    assert runner.num_sms == torch.get_num_threads()


def test_device_without_a_runner():
    config = dataclasses.replace(Case(lengths=(1,)).config(), device=torch.device("meta"))
    with pytest.raises(ConfigurationError, match=r"^no T5 kernels for device type 'meta' in this build$"):
        create_runner(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "5 query heads do not divide by 2 KV heads"),
        ({"head_size": 96}, "head size 96: accepted: 64, 128, 256"),
        ({"page_size": 48}, "page size 48: accepted: 16, 32, 64, 128"),
    ],
)
def test_shapes_that_no_runner_takes(changes, message):
    with pytest.raises(ConfigurationError) as error:
        dataclasses.replace(Case(lengths=(1,)).config(), **changes)
    assert str(error.value) == message


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 32), (128, 32)])
def test_query_tile(rows, tile):
    assert query_tile_rows(rows) == tile


@pytest.mark.parametrize(
    ("kv_heads", "group", "q_len", "slots"),
    [(4, 4, 1, 10), (4, 4, 4, 10), (2, 16, 4, 10), (8, 1, 1, 5), (1, 16, 1, 40)],
)
def test_slots_count_query_tiles(kv_heads, group, q_len, slots):
    config = Case(lengths=(1,), kv_heads=kv_heads, group=group).config()
    assert config.heads_per_kv_head == group
    assert config.slots(q_len, num_sms=20) == slots
