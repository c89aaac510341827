"""Speculative decoding with n-gram drafts: verification steps with as many query tokens a request run on T5."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engine.harness import Appliance

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

DRAFTS = 3
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
# A text that repeats itself is what n-gram drafts are good at.
REPETITION = "red green blue yellow red green blue yellow red green blue yellow red green blue yellow red green"


@pytest.fixture(scope="module")
def appliance(serve: Callable[..., AbstractContextManager[Appliance]], demo_model: Path) -> Iterator[Appliance]:
    flags = ("--offline", "--max-model-len", "2048", "--", "--enforce-eager", "--no-enable-prefix-caching")
    with serve(demo_model, *flags, "--speculative-config", json.dumps(SPECULATION)) as running:
        yield running


def test_verification_steps_run_on_t5(appliance: Appliance) -> None:
    before = appliance.steps()
    with appliance.client() as client:
        done = client.completions.create(
            model="SmolLM2-135M-Instruct",
            prompt=REPETITION,
            max_tokens=64,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    seen = appliance.steps() - before
    assert done.usage is not None
    assert done.usage.completion_tokens == 64
    drafted = seen.total("vllm:spec_decode_num_draft_tokens_total")
    accepted = seen.total("vllm:spec_decode_num_accepted_tokens_total")
    assert seen.t5("verify") >= 10
    assert accepted > 0
    # One request: every step but the prompt's is uniform, with one query token more than it has drafts.
    assert seen.fallback_steps == seen.fallback("prefill") == 1
    assert seen.total("mjolnir_t5_tokens_total") == seen.t5_steps + drafted
    assert seen.t5("verify") == seen.total("vllm:spec_decode_num_drafts_total")
    # Each step gives one token and those of its drafts that were right; the last may be cut at the limit.
    assert 64 - 1 <= seen.t5_steps + accepted <= 64 - 1 + DRAFTS
    assert "q_len<=4" in appliance.log


def test_text_is_that_of_plain_decoding(
    appliance: Appliance, serve: Callable[..., AbstractContextManager[Appliance]], demo_model: Path
) -> None:
    """Verification with T5 accepts only what plain greedy decoding with T5 would have said."""
    question = [{"role": "user", "content": "Repeat after me: one two three four. One two three four."}]
    with appliance.client() as client:
        speculative = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=question, temperature=0, max_tokens=24
        )
    flags = ("--offline", "--max-model-len", "2048", "--", "--enforce-eager", "--no-enable-prefix-caching")
    with serve(demo_model, *flags) as plain, plain.client() as client:
        expected = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=question, temperature=0, max_tokens=24
        )
    assert speculative.choices[0].message.content == expected.choices[0].message.content
