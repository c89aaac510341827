"""Mixed steps that are split, in a real engine: each is counted, as vLLM's scheduler has made them."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from mjolnir.bench.agreement import CASES, Case, generate
from mjolnir.bench.prompts import PROMPTS
from mjolnir.counters import Snapshot, read_all
from mjolnir.steps import MIN_SPLIT_DECODES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 14
CHUNKED = next(case for case in CASES if case.options.get("max_num_batched_tokens"))


def split_case(stats: Path) -> Case:
    """Chunked prefill with mixed steps split, in one process and without cached prefixes, so that steps are known."""
    environment = {"MJOLNIR_ATTN_SPLIT_MIXED": "1", "MJOLNIR_STATS_DIR": str(stats)}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options = {"enable_prefix_caching": False, "async_scheduling": False}
    return dataclasses.replace(
        CHUNKED,
        name=f"{CHUNKED.name}, split",
        tokens=TOKENS,
        options=CHUNKED.options | options,
        environment=environment,
    )


def scheduled(prompts: list[int], answers: list[int], budget: int) -> list[list[tuple[int, int, int]]]:
    """(query tokens, tokens computed before, tokens of the prompt) of each request of each step, as vLLM schedules."""
    computed, running, waiting = [0] * len(prompts), list[int](), list(range(len(prompts)))
    steps = []
    while waiting or running:
        left, step, taken = budget, [], {}
        for request in [*running, *waiting]:
            known = max(prompts[request], computed[request] + 1)
            taken[request] = min(left, known - computed[request])
            left -= taken[request]
            if taken[request]:
                step.append((taken[request], computed[request], prompts[request]))
        for request, tokens in taken.items():
            computed[request] += tokens
        waiting = [request for request in waiting if not taken[request]]
        live = [request for request in taken if request not in waiting]
        running = [each for each in live if computed[each] < prompts[each] + answers[each] - 1]
        steps.append(step)
    return steps


def counts(steps: list[list[tuple[int, int, int]]]) -> Counter[str]:
    """What the counters must show after these steps."""
    found: Counter[str] = Counter()
    for step in steps:
        tokens = sum(taken for taken, _, _ in step)
        leading = sum(taken == 1 and before > 0 for taken, before, _ in step)
        decoding = any(before >= prompt for _, before, prompt in step)
        if leading == len(step):
            kind, ours = "t5:decode", tokens
        elif leading >= MIN_SPLIT_DECODES:
            kind, ours = "t5:split", leading
        else:
            kind, ours = f"fallback:{'mixed' if decoding else 'prefill'}", 0
        found += Counter({kind: 1, "t5_tokens": ours, "fallback_tokens": tokens - ours})
    return found


def prompt_tokens(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]


def test_counts_are_those_of_the_schedule(demo_model: Path, tmp_path: Path) -> None:
    case = split_case(tmp_path / "stats")
    answers = [len(answer) for answer in generate(str(demo_model), case)]
    lengths = prompt_tokens(demo_model)
    wanted: Counter[str] = Counter()
    for first in range(0, len(PROMPTS), case.batch):
        batch = slice(first, first + case.batch)
        wanted += counts(scheduled(lengths[batch], answers[batch], case.options["max_num_batched_tokens"]))
    (snapshot,) = (found for _, found in read_all(tmp_path / "stats"))
    assert isinstance(snapshot, Snapshot)
    assert {name: number for name, number in snapshot.counters.items() if number} == wanted
    assert wanted["t5:split"] >= 10
