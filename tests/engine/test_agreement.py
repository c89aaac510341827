"""Thirty prompts, answered greedily, against CPU_ATTN over a bf16 cache, by log-probabilities."""

import dataclasses
from pathlib import Path

import pytest

from mjolnir.bench.agreement import CASES, FALLBACK, REFERENCE, Comparison, Step, compare, measure

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

# `scripts/bench agreement` generates 64; most answers have parted from the reference's long before that.
TOKENS = 14
# The split plan runs 8 at a time too.
RUN = [dataclasses.replace(case, tokens=TOKENS) for case in CASES if case.name != "8 at a time"]


def step(token: int, **logprobs: float) -> Step:
    return Step(token, {int(name[1:]): value for name, value in logprobs.items()})


def test_compares_up_to_the_first_difference() -> None:
    reference = [step(1, t1=-0.5, t2=-1.5), step(2, t2=-0.7, t3=-0.9), step(4, t4=0.0, t5=-9.0)]
    other = [step(1, t1=-0.75, t2=-1.25), step(3, t3=-0.6, t2=-0.8), step(9, t9=0.0, t8=-9.0)]
    found = compare(reference, other)
    assert found.same is False
    assert found.errors == pytest.approx((0.25,))
    assert found.margin_errors == pytest.approx((0.5, 0.4))
    assert found.margin == pytest.approx(0.2)
    assert found.distance == pytest.approx(0.2)
    assert compare(reference, reference) == Comparison(True, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))


def test_parts_from_the_reference_only_at_near_ties(demo_model: Path) -> None:
    """In every case a different token comes only where the margin is within what an fp8 cache does to margins.

    That is measured in the same run by the fallback without T5. T5 itself must not add to it.
    """
    # What only sets the scale runs in batches, which takes less time.
    scale, reference = (dataclasses.replace(case, batch=8, tokens=TOKENS) for case in (FALLBACK, REFERENCE))
    fallback, *cases = measure(str(demo_model), (scale, *RUN), reference)
    assert [row["case"] for row in cases] == [case.name for case in RUN]
    for row in cases:
        assert row["prompts"] == 30
        assert row["tokens_compared"] >= 150, row
        assert max(row["divergence_margins"], default=0.0) <= fallback["margin_error_p99"], (row, fallback)
        # Measured: 0.28 to 0.40; vLLM's own kernel over an fp8 cache: 0.44 (docs/results/agreement-cpu.json).
        assert row["logprob_error_p99"] <= 0.5, row
        assert row["logprob_error_median"] <= 0.03, row
        assert row["divergences_outside_top5"] == 0, row
