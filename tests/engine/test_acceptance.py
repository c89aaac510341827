"""The whole path with the demo's model: client, supervisor, patched vLLM, MJOLNIR, T5, counters, /metrics."""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import psutil
import pytest

from appliance.estimate.config import load
from appliance.estimate.estimate import GIB, Load, Machine, estimate
from tests.engine.harness import Appliance

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M-Instruct"
# Without "with one word" the model begins with The or L' at a margin of 0.1, which the rounding of a CPU decides.
PARIS = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


@pytest.fixture(scope="module")
def appliance(serve: Callable[..., AbstractContextManager[Appliance]], demo_model: Path) -> Iterator[Appliance]:
    # Without prefix caching every prompt is computed, so the number of steps follows from the token counts.
    flags = ("--offline", "--max-model-len", "2048", "--", "--enforce-eager", "--no-enable-prefix-caching")
    with serve(demo_model, *flags) as running:
        yield running


def generate(client: openai.OpenAI, prompt: str, tokens: int) -> int:
    """Generate exactly ``tokens`` tokens; returns the number of prompt tokens."""
    done = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == tokens
    return done.usage.prompt_tokens


class Stream:
    """A generation that runs in the background; `begun` is set when its first token has come."""

    def __init__(self, client: openai.OpenAI, prompt: str, tokens: int) -> None:
        self.begun = threading.Event()
        self.prompt_tokens = 0
        self._arguments = (client, prompt, tokens)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, prompt, tokens = self._arguments
        with client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ) as stream:
            for chunk in stream:
                self.begun.set()
                if chunk.usage is not None:
                    self.prompt_tokens = chunk.usage.prompt_tokens

    @property
    def ended(self) -> bool:
        """Whether the last token has come."""
        return not self._thread.is_alive()

    def join(self) -> int:
        """Wait for the end; returns the number of prompt tokens."""
        self._thread.join()
        return self.prompt_tokens


def test_answers_with_paris(appliance: Appliance) -> None:
    with appliance.client() as client:
        whole = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=32)
        with client.chat.completions.create(
            model=MODEL, messages=PARIS, temperature=0, max_tokens=32, stream=True
        ) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "Paris" in (whole.choices[0].message.content or "")
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 1, "the answer did not come in pieces"


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_counts_the_steps_of_one_request(appliance: Appliance, tokens: int) -> None:
    """The prompt gives the first token; each further one is a decode step of its own."""
    before = appliance.steps()
    with appliance.client() as client:
        prompt_tokens = generate(client, "The robot opened the door and", tokens)
    seen = appliance.steps() - before
    assert seen.t5("decode") == tokens - 1
    assert seen.t5_steps == tokens - 1
    assert seen.fallback("prefill") == seen.fallback_steps == 1
    assert seen.total("mjolnir_t5_tokens_total") == tokens - 1
    assert seen.total("mjolnir_fallback_tokens_total") == prompt_tokens
    assert seen.engine_steps == tokens


def test_counts_the_steps_of_eight_concurrent_requests(appliance: Appliance) -> None:
    """Decoded tokens ride in T5 steps, or in the mixed steps in which another's prompt is read."""
    lengths = [24, 32, 40, 48, 56, 64, 72, 80]
    before = appliance.steps()
    with appliance.client() as client, ThreadPoolExecutor(8) as pool:
        prompts = [f"Story number {number} begins with" for number in range(8)]
        prompt_tokens = sum(pool.map(lambda pair: generate(client, *pair), zip(prompts, lengths, strict=True)))
    seen = appliance.steps() - before
    decoded = sum(length - 1 for length in lengths)
    assert seen.tokens == prompt_tokens + decoded
    in_mixed_steps = seen.total("mjolnir_fallback_tokens_total") - prompt_tokens
    assert seen.total("mjolnir_t5_tokens_total") == decoded - in_mixed_steps
    assert seen.fallback_steps == seen.fallback("prefill") + seen.fallback("mixed")
    assert 1 <= seen.fallback_steps <= 8
    assert seen.t5_steps == seen.t5("decode") == seen.engine_steps - seen.fallback_steps
    # The longest request decodes in every step after its own prompt. How far the others overlap with it depends on
    # when each one's prompt came in, which is not the engine's to say.
    assert max(lengths) - 1 - seen.fallback("mixed") <= seen.t5_steps <= decoded - in_mixed_steps


def test_counts_the_steps_of_staggered_requests(appliance: Appliance) -> None:
    """One long request spans two short ones: each short prompt makes one mixed step of a decode step."""
    # So long that the short ones end first also where each of their steps waits for a busy machine.
    long, short = 480, 12
    before = appliance.steps()
    with appliance.client() as client:
        spanning = Stream(client, "The long report starts here:", long)
        assert spanning.begun.wait(60)
        prompt_tokens = generate(client, "A short note:", short)
        prompt_tokens += generate(client, "Another short note:", short)
        assert not spanning.ended, "the long report ended before the short notes did"
        prompt_tokens += spanning.join()
    seen = appliance.steps() - before
    assert seen.fallback("prefill") == 1
    assert seen.fallback("mixed") == 2
    assert seen.t5("decode") == seen.t5_steps == long - 1 - 2
    assert seen.engine_steps == long
    assert seen.total("mjolnir_fallback_tokens_total") == prompt_tokens + 2
    assert seen.total("mjolnir_t5_tokens_total") == (long - 1) + 2 * (short - 1) - 2


def test_metrics_page_has_ours_and_vllms(appliance: Appliance) -> None:
    samples = appliance.metrics()
    names = {name for name, _ in samples}
    assert {"vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= names
    assert samples["appliance_engine_state", (("appliance_engine_state", "ready"),)] == 1
    (group,) = [dict(labels) for name, labels in samples if name == "mjolnir_group_info"]
    assert group == {
        "group": "model.layers.0.self_attn.attn (30 layers)",
        "kv_format": "fp8",
        "head_size": "64",
        "page_size": "128",
        "fallback": "TORCH_REF",
        "reason": "",
    }
    lines = appliance.get("/metrics").splitlines()
    types = [line for line in lines if line.startswith("# TYPE ")]
    assert len(types) == len(set(types)), "a family stands on the page twice"


def test_estimate_is_what_the_engine_reports(appliance: Appliance, demo_model: Path) -> None:
    reported = re.findall(r"CPU KV cache size: ([\d,]+) tokens", appliance.log)
    machine = Machine(8 * GIB, gpu=False, kv_cache=GIB)
    found = estimate(load(str(demo_model)), machine, Load(max_model_len=2048))
    (fp8,) = [each for each in found.formats if each.format == "fp8"]
    assert reported == [f"{fp8.tokens:,}"]


def test_survives_a_killed_engine_core(appliance: Appliance) -> None:
    """The engine comes back by itself, and no counter goes backwards."""
    with appliance.client() as client:
        generate(client, "Before the fall", 8)
        before = appliance.steps()
        (core,) = [process for process in appliance.engine_processes() if "EngineCore" in process.name()]
        family = appliance.engine_processes()
        core.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert core in gone
        appliance.wait_until_ready()
        assert appliance.steps().t5_steps == before.t5_steps
        generate(client, "After the fall", 8)
    seen = appliance.steps()
    assert seen.t5_steps == before.t5_steps + 7
    assert seen.fallback_steps == before.fallback_steps + 1
    assert seen.total("appliance_engine_restarts_total") == 1
