"""The 6-bit cache through the whole path: calibrate the demo's model, serve it, count its steps."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest

from appliance.command import engine_libraries
from mjolnir import scales
from mjolnir.calibration import MARK, Request
from mjolnir.calibration_prompts import PROMPTS
from tests.engine.harness import Appliance

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ANSWER_TOKENS = 8
MODEL = "SmolLM2-135M-Instruct"
LONG = "The robot counted: " + ", ".join(str(number) for number in range(300))


@pytest.fixture(scope="module")
def scale_file(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scales of the demo's model from eight prompts.

    What is seen of K and V comes from the prompts; eight tokens of an answer show that decode steps are seen too.
    """
    folder = tmp_path_factory.mktemp("calibration")
    out = folder / "scales" / f"{MODEL}.json"
    request = Request(str(demo_model), str(out), str(folder / "parts"), list(PROMPTS[::8]), answer_tokens=ANSWER_TOKENS)
    environment = {**os.environ, **engine_libraries(), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mjolnir.calibration", json.dumps(asdict(request))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    told = [json.loads(line.removeprefix(MARK)) for line in result.stdout.splitlines() if line.startswith(MARK)]
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert told == [{"done": 8, "total": 8}, {"written": str(out)}]
    return out


@pytest.fixture(scope="module")
def appliance(
    serve: Callable[..., AbstractContextManager[Appliance]], demo_model: Path, scale_file: Path
) -> Iterator[Appliance]:
    flags = ("--offline", "--max-model-len", "2048", "--kv-cache-dtype", "fp6_e2m3")
    rest = ("--cache-dir", str(scale_file.parents[1]), "--", "--enforce-eager", "--max-num-batched-tokens", "512")
    with serve(demo_model, *flags, *rest) as running:
        yield running


def test_calibration_knows_every_layer(scale_file: Path) -> None:
    """30 layers, 3 KV heads of 64; turned rows, of which no channel is far larger than the others."""
    file = scales.load(scale_file)
    assert file.model == scales.ModelShape(name=MODEL, architecture="LlamaForCausalLM", num_kv_heads=3, head_size=64)
    assert sorted(file.layers) == sorted(f"model.layers.{number}.self_attn.attn" for number in range(30))
    assert all(layer.k_turned and layer.v_turned for layer in file.layers.values())
    # Eight prompts have 935 tokens; an answer's last token has no K and V, and an answer may end early.
    assert 935 < file.made.tokens <= 935 + 8 * (ANSWER_TOKENS - 1)
    first = file.layers["model.layers.0.self_attn.attn"]
    scales_of_k = [scale for row in first.k for scale in row]
    assert 1.5 < max(scales_of_k) / min(scales_of_k) < 10
    assert 0.01 < first.k_fp8 < 0.04  # 0.024 with all prompts
    assert 0.0005 < first.v_fp8 < 0.002  # 0.0013


def test_answers_with_paris_and_shows_its_format(appliance: Appliance) -> None:
    with appliance.client() as client:
        # Not the chat question: with a bf16 cache its first token leads by 0.12 nats, which fp8 loses too on some CPUs.
        begun = "France is a country in Europe. The capital of France is"
        answer = client.completions.create(model=MODEL, prompt=begun, temperature=0, max_tokens=8)
    assert answer.choices[0].text.startswith(" Paris")
    (group,) = [dict(labels) for name, labels in appliance.metrics() if name == "mjolnir_group_info"]
    assert group["kv_format"] == "fp6_e2m3"
    assert group["reason"] == ""
    # 30 layers, pages of 128 tokens, 3 heads, 96 bytes a cell: 1 GiB holds 970 pages.
    assert "CPU KV cache size: 124,160 tokens" in appliance.log or "GPU KV cache size: 124,160 tokens" in appliance.log


def test_counts_the_steps_of_a_chunked_prompt(appliance: Appliance) -> None:
    """A prompt of three chunks: the second and third read what the first wrote, expanded."""
    before = appliance.steps()
    with appliance.client() as client:
        done = client.completions.create(
            model=MODEL, prompt=LONG, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
    assert done.usage is not None
    assert 1024 < done.usage.prompt_tokens <= 1536
    seen = appliance.steps() - before
    assert seen.t5("decode") == seen.t5_steps == 11
    assert seen.fallback("prefill") == seen.fallback_steps == 3
    assert seen.total("mjolnir_t5_tokens_total") == 11
    assert seen.total("mjolnir_fallback_tokens_total") == done.usage.prompt_tokens
    assert seen.engine_steps == 12  # vLLM counts steps that give a token: the last chunk and 11 more
    assert ", 30" in done.choices[0].text, "it does not count on"


def test_a_shared_prefix_is_read_by_both(appliance: Appliance) -> None:
    """The same prompt again comes from the prefix cache, and gives the same text from the same pages."""
    texts = []
    with appliance.client() as client:
        for _ in range(2):
            done = client.completions.create(model=MODEL, prompt=LONG, max_tokens=12, temperature=0)
            texts.append(done.choices[0].text)
    assert texts[0] == texts[1]
