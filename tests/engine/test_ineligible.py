"""Models that T5 can't run still serve, on the fallback, and say why."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Appliance

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TINY = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
HEAD_SIZE_80 = {"model_type": "llama", "head_dim": 80}
SLIDING_WINDOW = {"model_type": "mistral", "head_dim": 64, "sliding_window": 32}


@pytest.fixture
def make_model(tmp_path: Path, demo_model: Path) -> Callable[[dict[str, Any]], Path]:
    """Build a random model of a given shape with the demo model's tokenizer."""

    def make(shape: dict[str, Any]) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY, **shape), dtype=torch.bfloat16)
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(demo_model).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        pytest.param(HEAD_SIZE_80, "head_size 80 is not one of 64, 128, 256", id="head size 80"),
        pytest.param(SLIDING_WINDOW, "sliding-window KV spec (32 tokens)", id="sliding window"),
    ],
)
def test_serves_on_the_fallback(
    serve: Callable[..., AbstractContextManager[Appliance]],
    make_model: Callable[[dict[str, Any]], Path],
    shape: dict[str, Any],
    reason: str,
) -> None:
    with serve(make_model(shape), "--offline", "--", "--enforce-eager") as appliance, appliance.client() as client:
        done = client.completions.create(
            model="model", prompt="one two three " * 20, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
        )
        seen = appliance.steps()
        (group,) = [dict(labels) for name, labels in appliance.metrics() if name == "mjolnir_group_info"]
        log = appliance.log
    assert done.usage is not None
    assert done.usage.completion_tokens == 16
    assert seen.t5_steps == 0
    assert seen.fallback("ineligible") == seen.fallback_steps == 16
    assert group["reason"] == reason
    assert group["fallback"] == "TORCH_REF"
    assert log.count(f"{reason} -> TORCH_REF for all steps") == 1
