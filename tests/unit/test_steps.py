"""Step classification: one row a rule, and exactly one decision for any batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjolnir.names import FallbackReason, StepKind
from mjolnir.steps import MIN_SPLIT_DECODES, Batch, FallbackStep, SplitStep, StepLimits, T5Step, classify, split

LIMITS = StepLimits(max_q_len=4, max_num_seqs=8)
DECODE, VERIFY, NONCAUSAL, DRAFT, _ = StepKind
NON_UNIFORM, Q_LEN = FallbackReason.NON_UNIFORM, FallbackReason.Q_LEN


def batch(query_lens: list[int], *, max_query_len: int | None = None, prefilling: list[bool] | None = None, **rest):
    return Batch(
        query_start_loc=np.cumsum([0, *query_lens]).astype(np.int32),
        max_query_len=max(query_lens, default=0) if max_query_len is None else max_query_len,
        is_prefilling=None if prefilling is None else np.array(prefilling, dtype=bool),
        **rest,
    )


@pytest.mark.parametrize(
    ("step", "q_len", "kind"),
    [
        pytest.param(batch([1]), 1, DECODE, id="one request"),
        pytest.param(batch([1, 1, 1]), 1, DECODE, id="decodes"),
        pytest.param(batch([4, 4, 4]), 4, VERIFY, id="verification, as long as may be"),
        pytest.param(batch([4, 4, 0, 0]), 4, VERIFY, id="padding at the end"),
        pytest.param(batch([1, 0, 0]), 1, DECODE, id="decode with padding at the end"),
        pytest.param(batch([1] * 8), 1, DECODE, id="as many requests as may be"),
        pytest.param(batch([3, 3, 3], prefilling=[True] * 3), 3, VERIFY, id="short prompts of one length"),
        pytest.param(batch([0, 0, 0], max_query_len=1), 1, DECODE, id="padding only"),
        pytest.param(batch([0, 0], max_query_len=4), 4, VERIFY, id="padding only, of a longer graph"),
        pytest.param(batch([4, 4], causal=False), 4, NONCAUSAL, id="a parallel drafter's block"),
        pytest.param(batch([1, 1], causal=False), 1, DECODE, id="one token sees all keys in any case"),
        pytest.param(batch([1, 1], bidirectional_ranges=True), 1, DECODE, id="no later token to see"),
    ],
)
def test_taken(step, q_len, kind):
    assert classify(step, LIMITS) == T5Step(q_len, kind)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        pytest.param(batch([5, 5]), Q_LEN, id="longer than T5 is configured for"),
        pytest.param(batch([5, 5, 0]), Q_LEN, id="longer, with padding"),
        pytest.param(batch([1, 1], max_query_len=5), Q_LEN, id="graph of a longer query length"),
        pytest.param(batch([], max_query_len=1), Q_LEN, id="no request"),
        pytest.param(batch([0, 0], max_query_len=0), Q_LEN, id="no token"),
        pytest.param(batch([1] * 9), FallbackReason.BATCH, id="more requests than buffers"),
        pytest.param(batch([1] * 8 + [0]), FallbackReason.BATCH, id="padding counts as requests"),
        pytest.param(batch([1, 1], causal=None), FallbackReason.CAUSAL_TENSOR, id="a mask per request"),
        pytest.param(batch([2, 2], bidirectional_ranges=True), FallbackReason.CAUSAL_TENSOR, id="images"),
        pytest.param(batch([1, 1], context_parallel=True), FallbackReason.CONTEXT_PARALLEL, id="context parallel"),
        pytest.param(batch([4, 3]), NON_UNIFORM, id="shorter at the end"),
        pytest.param(batch([3, 4]), NON_UNIFORM, id="shorter at the start"),
        pytest.param(batch([4, 0, 4]), NON_UNIFORM, id="padding in between"),
        pytest.param(batch([0, 4, 4]), NON_UNIFORM, id="padding at the start"),
        pytest.param(batch([0, 1, 1]), NON_UNIFORM, id="padding at the start of decodes"),
        pytest.param(batch([0, 1, 1], prefilling=[False] * 3), NON_UNIFORM, id="the same, with known prefill flags"),
        pytest.param(batch([1, 7]), NON_UNIFORM, id="lengths differ, prefill unknown"),
        pytest.param(batch([9, 7], prefilling=[True, True]), FallbackReason.PREFILL, id="prompts"),
        pytest.param(batch([9, 0], prefilling=[True, False]), FallbackReason.PREFILL, id="a prompt and padding"),
        pytest.param(batch([3, 2], prefilling=[True, True]), FallbackReason.PREFILL, id="short prompts"),
        pytest.param(batch([1, 7], prefilling=[False, True]), FallbackReason.MIXED, id="prompt beside decode"),
        pytest.param(batch([1, 3], prefilling=[False, True]), FallbackReason.MIXED, id="short prompt beside decode"),
        pytest.param(batch([1, 7, 0], prefilling=[False, True, True]), FallbackReason.MIXED, id="padding flagged"),
        pytest.param(batch([5, 5], prefilling=[False, False]), Q_LEN, id="long decodes"),
        pytest.param(batch([4, 3], prefilling=[False, False]), NON_UNIFORM, id="odd decodes"),
        pytest.param(batch([4, 3, 0], prefilling=[False, False, True]), NON_UNIFORM, id="flag of padding is nothing"),
    ],
)
def test_refused(step, reason):
    assert classify(step, LIMITS) == FallbackStep(reason)


def test_the_first_reason_is_given():
    """Length, then batch size, mask, context parallelism, then evenness."""
    everything = {"causal": None, "context_parallel": True}
    assert classify(batch([5] * 9, **everything), LIMITS) == FallbackStep(Q_LEN)
    assert classify(batch([4, 3, *[1] * 7], **everything), LIMITS) == FallbackStep(FallbackReason.BATCH)
    assert classify(batch([4, 3], **everything), LIMITS) == FallbackStep(FallbackReason.CAUSAL_TENSOR)
    assert classify(batch([4, 3], context_parallel=True), LIMITS) == FallbackStep(FallbackReason.CONTEXT_PARALLEL)


def test_non_causal_steps_can_be_switched_off():
    limits = StepLimits(max_q_len=4, max_num_seqs=8, noncausal=False)
    assert classify(batch([4, 4], causal=False), limits) == FallbackStep(FallbackReason.CAUSAL_TENSOR)
    assert classify(batch([4, 4], causal=True), limits) == T5Step(4, VERIFY)


@pytest.mark.parametrize(
    ("query_lens", "causal", "kind"), [([1, 1], True, DRAFT), ([2, 2], True, DRAFT), ([2, 2], False, NONCAUSAL)]
)
def test_kinds_of_a_drafters_steps(query_lens, causal, kind):
    limits = StepLimits(max_q_len=4, max_num_seqs=8, draft=True)
    assert classify(batch(query_lens, causal=causal), limits) == T5Step(query_lens[0], kind)


def is_uniform(query_lens: list[int], q_len: int) -> bool:
    """Written as the rule reads: some requests of ``q_len`` tokens, then only padding."""
    return any(query_lens == [q_len] * live + [0] * (len(query_lens) - live) for live in range(len(query_lens) + 1))


@settings(deadline=None)
@given(query_lens=st.lists(st.integers(0, 3), min_size=1, max_size=8), announced=st.integers(1, 4))
def test_uniform_means_equal_and_then_nothing(query_lens, announced):
    taken = isinstance(classify(batch(query_lens, max_query_len=announced), LIMITS), T5Step)
    assert taken == is_uniform(query_lens, announced)


@settings(deadline=None)
@given(data=st.data(), query_lens=st.lists(st.integers(0, 6), max_size=10), causal=st.sampled_from([True, False, None]))
def test_any_batch_gets_one_decision_and_labels_do_not_change_it(data, query_lens, causal):
    """Capture and replay know different prefill flags; who runs the step must not depend on them."""
    flags = data.draw(st.lists(st.booleans(), min_size=len(query_lens), max_size=len(query_lens)))
    rest = {"causal": causal, "context_parallel": data.draw(st.booleans())}
    decision = classify(batch(query_lens, prefilling=flags, **rest), LIMITS)
    blind = classify(batch(query_lens, **rest), LIMITS)
    assert type(decision) is type(blind)
    if isinstance(decision, T5Step):
        assert decision == blind
        assert decision.kind in StepKind
    else:
        assert decision.reason in FallbackReason


# Steps that are split.


@pytest.mark.parametrize(
    ("step", "q_len", "num_decodes"),
    [
        pytest.param(batch([1, 1, 1, 1, 900]), 1, 4, id="a prompt"),
        pytest.param(batch([1] * 5 + [64, 900]), 1, 5, id="a chunk and a prompt"),
        pytest.param(batch([1] * 7 + [2]), 1, 7, id="as many requests as may be"),
        pytest.param(batch([4] * 4 + [1, 1]), 4, 4, id="verification, and requests without drafts"),
        pytest.param(batch([2] * 4 + [5]), 2, 4, id="the run counts, not what is longer than T5 takes"),
        pytest.param(batch([1] * 4 + [0, 9, 0]), 1, 4, id="padding is the tail's"),
        pytest.param(batch([1] * 4 + [9, 1, 1]), 1, 4, id="later decodes are the tail's"),
        pytest.param(batch([1] * 4 + [9], prefilling=[True] * 5), 1, 4, id="labels decide nothing"),
    ],
)
def test_split_after_the_longest_run(step, q_len, num_decodes):
    assert isinstance(classify(step, LIMITS), FallbackStep)
    assert split(step, LIMITS) == SplitStep(q_len, num_decodes)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(batch([1] * 3 + [900]), id="too few decodes"),
        pytest.param(batch([900, 1, 1, 1, 1]), id="no decode leads"),
        pytest.param(batch([0, 1, 1, 1, 1, 900]), id="padding leads"),
        pytest.param(batch([5] * 4 + [1]), id="longer than T5 takes"),
        pytest.param(batch([1] * 8), id="decodes alone"),
        pytest.param(batch([4] * 4 + [0] * 3), id="decodes and padding"),
        pytest.param(batch([1] * 8 + [900]), id="more requests than buffers"),
        pytest.param(batch([1] * 4 + [900], causal=None), id="a mask per request"),
        pytest.param(batch([1] * 4 + [900], causal=False), id="not causal"),
        pytest.param(batch([1] * 4 + [900], bidirectional_ranges=True), id="images"),
        pytest.param(batch([1] * 4 + [900], context_parallel=True), id="context parallel"),
        pytest.param(batch([]), id="no request"),
    ],
)
def test_not_split(step):
    assert split(step, LIMITS) is None


def test_drafters_steps_are_not_split():
    step = batch([1] * 4 + [900])
    assert split(step, StepLimits(max_q_len=4, max_num_seqs=8, draft=True)) is None
    assert split(step, StepLimits(max_q_len=4, max_num_seqs=8)) == SplitStep(1, 4)


@settings(deadline=None)
@given(query_lens=st.lists(st.sampled_from([0, 1, 1, 1, 4, 4, 4, 9]), max_size=8))
def test_captured_batches_are_never_split_and_others_exactly_as_the_rule_reads(query_lens):
    """A FULL graph is captured and replayed for uniform batches alone, with padding behind."""
    found = split(batch(query_lens), LIMITS)
    if any(is_uniform(query_lens, q_len) for q_len in range(5)):
        assert found is None
        return
    first = query_lens[0]
    run = next((at for at, length in enumerate(query_lens) if length != first), len(query_lens))
    wanted = 1 <= first <= 4 and run >= MIN_SPLIT_DECODES and any(query_lens[run:])
    assert found == (SplitStep(first, run) if wanted else None)
