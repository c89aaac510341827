"""`mjolnir estimate` against vLLM's own functions: the same tokens, the same longest context, the same weights."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from appliance.estimate.config import load
from appliance.estimate.estimate import GIB, Estimate, Load, Machine, estimate, scratch_bytes
from appliance.estimate.layers import Attention
from tests.appliance import published_models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CACHE_GIB = 32
# GQA with heads of 64, 1-of-6 global layers, nothing but windows, two head sizes with shared KV, Mamba-2, delta nets.
QUANTISED = ("SMOLLM2_135M", "GEMMA3_1B", "MISTRAL_7B", "GEMMA4_SHAPE", "NEMOTRON_NANO_9B_V2", "QWEN3_NEXT_80B")
PLAIN = ("SMOLLM2_135M", "GEMMA3_1B", "NEMOTRON_NANO_9B_V2", "DEEPSEEK_V2_LITE")
PACKED = ("SMOLLM2_135M", "GEMMA3_1B", "NEMOTRON_NANO_9B_V2")
MODELS = {"fp8": QUANTISED, "auto": PLAIN, "fp6_e2m3": PACKED}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in {*QUANTISED, *PLAIN}:
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(published_models.ALL[name]))
    return root


@cache
def of_vllm(root: Path, kv_format: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What vLLM says; one process for all models of a format, because its import takes most of the time."""
    script = Path(__file__).with_name("vllm_capacity.py")
    command = [sys.executable, str(script), str(root / f"rendezvous-{kv_format}"), str(CACHE_GIB), kv_format, *names]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("CAPACITY ")]
    found: dict[str, Any] = json.loads(line.removeprefix("CAPACITY "))
    return found


def ours(root: Path, name: str, float32_states: bool, limit: int | None = None) -> Estimate:
    machine = Machine(64 * GIB, gpu=False, kv_cache=CACHE_GIB * GIB, float32_states=float32_states)
    return estimate(load(str(root / name)), machine, Load(max_model_len=limit))


def test_scratch_is_the_backends() -> None:
    import torch

    from mjolnir import scratch

    for limit in (8192, 65_408, 65_409, 262_144):
        buffer = scratch.tokens_for(limit) * scratch._token_bytes(4, 256, torch.bfloat16)
        assert scratch_bytes([Attention(4, 256, 256), Attention(4, 128, 128)], limit) == buffer


@pytest.mark.parametrize(
    ("kv_format", "name"), [(kv_format, name) for kv_format, names in MODELS.items() for name in names]
)
def test_agrees_with_vllm(folders: Path, kv_format: str, name: str) -> None:
    theirs = of_vllm(folders, kv_format, MODELS[kv_format])[name]
    found = ours(folders, name, theirs["wide"])
    (each,) = [each for each in found.formats if each.format == kv_format]
    assert each.tokens == theirs["tokens"]
    assert found.weights.size == pytest.approx(theirs["weights"], rel=1e-4)
    # Without a limit, so that the longest context is the cache's and not the model's.
    unbounded = ours(folders, name, theirs["wide"], limit=1 << 30)
    (each,) = [each for each in unbounded.formats if each.format == kv_format]
    assert each.longest == theirs["longest"]
