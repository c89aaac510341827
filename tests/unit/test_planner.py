"""The split-KV plan: golden vectors, and what must hold for any batch."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjolnir.errors import PlanError
from mjolnir.planner import TILE_TOKENS, SplitPlan, WorkItem, plan_splits, wave_slots

GOLDEN = json.loads((Path(__file__).parent / "data" / "planner-golden.json").read_text())
VECTORS = GOLDEN["plans"]


def rows(plan: SplitPlan) -> list[tuple[int, int, int, int]]:
    return [(item.seq, item.tile_begin, item.tile_end, item.split) for item in plan.work]


def tiles(length: int) -> int:
    """Tiles of a sequence, counted one by one up to a size where that is cheap."""
    return max(1, len(range(0, length, TILE_TOKENS)))


def test_there_are_sixty_golden_vectors():
    assert len(VECTORS) == 60


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_golden_vector(vector):
    slots = wave_slots(vector["heads_k"], vector["q_tiles"], vector["sms"], vector["ctas_per_sm"])
    assert slots == vector["slots"]
    plan = plan_splits(vector["lens"], slots=slots, max_splits=vector["max_splits"])
    assert plan.slots == slots
    assert plan.chunk == vector["chunk"]
    assert list(plan.n_splits) == vector["n_splits"]
    assert rows(plan) == [tuple(row) for row in vector["work_nonempty"]]
    assert plan.grid == vector["grid"]


def test_golden_e2m3_values_are_the_format():
    """Sign, two exponent bits with bias 1, three mantissa bits; the table that the packed KV format will read."""
    for code, value in enumerate(GOLDEN["e2m3_values"]):
        sign, exponent, mantissa = (-1) ** (code >> 5), code >> 3 & 3, code & 7
        magnitude = mantissa / 8 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 8)
        assert value == sign * magnitude
    assert len(GOLDEN["e2m3_values"]) == 64


# Two programs an SM, at most 16 pieces: lengths, KV heads, SMs -> slots, chunk, pieces, some work rows by position.
@pytest.mark.parametrize(
    ("lens", "heads", "sms", "slots", "chunk", "n_splits", "work"),
    [
        ([1], 4, 20, 10, 1, [1], {0: (0, 0, 1, 0)}),
        ([128], 4, 20, 10, 1, [1], {0: (0, 0, 1, 0)}),
        ([129], 4, 20, 10, 1, [2], {0: (0, 0, 1, 0), 1: (0, 1, 2, 1)}),
        ([1280], 4, 20, 10, 1, [10], {9: (0, 9, 10, 9)}),
        ([4096], 4, 20, 10, 4, [8], {7: (0, 28, 32, 7)}),
        ([65536], 4, 20, 10, 52, [10], {9: (0, 468, 512, 9)}),
        ([262144], 4, 20, 10, 205, [10], {9: (0, 1845, 2048, 9)}),
        ([0, 0], 4, 20, 10, 1, [1, 1], {0: (0, 0, 1, 0), 1: (1, 0, 1, 0)}),
        ([4096, 128], 4, 20, 10, 4, [8, 1], {8: (1, 0, 1, 0)}),
        ([8192, 1024, 64], 4, 20, 10, 8, [8, 1, 1], {9: (2, 0, 1, 0)}),
        ([100] * 10, 4, 20, 10, 1, [1] * 10, {9: (9, 0, 1, 0)}),
        ([5000] * 11, 4, 20, 10, 40, [1] * 11, {10: (10, 0, 40, 0)}),
        ([32768], 8, 20, 5, 52, [5], {0: (0, 0, 52, 0), 4: (0, 208, 256, 4)}),
        ([32768], 8, 132, 33, 16, [16], {15: (0, 240, 256, 15)}),
        ([300000], 1, 20, 40, 147, [16], {15: (0, 2205, 2344, 15)}),
    ],
)
def test_worked_examples(lens, heads, sms, slots, chunk, n_splits, work):
    assert wave_slots(heads, 1, sms, 2) == slots
    plan = plan_splits(lens, slots=slots, max_splits=16)
    assert (plan.chunk, list(plan.n_splits)) == (chunk, n_splits)
    assert len(plan.work) == max(work) + 1
    for position, row in work.items():
        assert rows(plan)[position] == row


@pytest.mark.parametrize(
    ("heads", "q_tiles", "sms", "ctas", "slots"),
    [(4, 1, 20, 2, 10), (4, 2, 20, 2, 5), (8, 1, 20, 1, 2), (7, 1, 20, 2, 5), (64, 4, 20, 2, 1), (1, 1, 132, 2, 264)],
)
def test_slots_of_a_wave(heads, q_tiles, sms, ctas, slots):
    assert wave_slots(heads, q_tiles, sms, ctas) == slots


batches = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


@settings(deadline=None)
@given(lens=batches, slots=st.integers(1, 300), max_splits=st.integers(1, 32), margin=st.sampled_from([0, 1, 4, 127]))
def test_any_plan(lens, slots, max_splits, margin):
    plan = plan_splits(lens, slots=slots, max_splits=max_splits, margin=margin)
    counts = [tiles(length + margin) for length in lens]
    for seq, count in enumerate(counts):
        pieces = sorted((item for item in plan.work if item.seq == seq), key=lambda item: item.split)
        # The pieces of a sequence tile [0, count): no gap, no overlap, numbered in order, none of them empty.
        assert [item.split for item in pieces] == list(range(plan.n_splits[seq]))
        assert [item.tile_begin for item in pieces] == [0, *(item.tile_end for item in pieces[:-1])]
        assert pieces[-1].tile_end == count
        assert all(1 <= item.tiles <= plan.chunk for item in pieces)
        assert len(pieces) <= max_splits
    assert sum(plan.n_splits) == len(plan.work) <= plan.grid == max(slots, len(lens))
    assert [item.tiles for item in plan.work] == sorted((item.tiles for item in plan.work), reverse=True)
    # Equally long items stay in sequence order.
    assert list(plan.work) == sorted(plan.work, key=lambda item: (-item.tiles, item.seq, item.split))


@settings(deadline=None)
@given(lens=batches, slots=st.integers(1, 300), max_splits=st.integers(1, 32))
def test_whether_a_batch_may_be_cut_depends_on_its_size_alone(lens, slots, max_splits):
    """A captured graph launches the merge by batch size: a cut batch of a size that never merges would be wrong."""
    plan = plan_splits(lens, slots=slots, max_splits=max_splits)
    if len(lens) >= slots or max_splits == 1:
        assert set(plan.n_splits) == {1}
        assert plan.chunk == max(tiles(length) for length in lens)


@settings(deadline=None)
@given(lens=batches, slots=st.integers(2, 300), max_splits=st.integers(2, 32))
def test_chunk_is_the_smallest_that_fits_one_wave(lens, slots, max_splits):
    if len(lens) >= slots:
        lens = lens[: slots - 1]
    counts = [tiles(length) for length in lens]
    chunk = plan_splits(lens, slots=slots, max_splits=max_splits).chunk

    def fits(size: int) -> bool:
        pieces = [len(range(0, count, size)) for count in counts]
        return sum(pieces) <= slots and max(pieces) <= max_splits

    assert fits(chunk)
    assert chunk == 1 or not fits(chunk - 1)


@settings(deadline=None)
@given(lens=batches, slots=st.integers(1, 300), margin=st.integers(0, 300))
def test_margin_plans_as_if_every_sequence_were_longer(lens, slots, margin):
    longer = [length + margin for length in lens]
    assert plan_splits(lens, slots=slots, max_splits=16, margin=margin) == plan_splits(
        longer, slots=slots, max_splits=16
    )


def test_margin_across_a_tile_boundary():
    assert plan_splits([127, 128], slots=4, max_splits=16, margin=1).n_splits == (1, 2)


def test_batch_of_slots_minus_one_is_cut_and_of_slots_is_not():
    assert max(plan_splits([5000] * 9, slots=10, max_splits=16).n_splits) == 1  # 9 x 40 tiles: 1 slot is left over
    assert plan_splits([5000] + [1] * 8, slots=10, max_splits=16).n_splits == (2, *[1] * 8)
    assert plan_splits([5000] + [1] * 9, slots=10, max_splits=16).n_splits == (1,) * 10


def test_grid_of_the_callers_choice():
    assert plan_splits([1], slots=4, max_splits=16, grid=64).grid == 64


def test_no_sequence_is_an_error():
    with pytest.raises(PlanError, match=r"^a plan needs at least one sequence$"):
        plan_splits([], slots=4, max_splits=16)


def test_more_items_than_the_grid_is_an_error():
    with pytest.raises(PlanError, match=r"^5 work items for a grid of 4$"):
        plan_splits([1] * 5, slots=2, max_splits=16, grid=4)


def test_tiles_of_an_item():
    assert WorkItem(seq=3, tile_begin=4, tile_end=9, split=1).tiles == 5
