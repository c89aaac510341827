"""The shipped recipes against vLLM itself: its flags, its parsers, on a sample of each family's tool calls.

Field note: tool calls are lost to a wrong parser, without any error.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from appliance import settings
from appliance.command import arguments
from appliance.profiles.schema import Method, Profile, Speculation
from appliance.profiles.store import Store

PROGRAM = Path(__file__).with_name("vllm_recipes.py")
RECIPES = {entry.name: entry.profile for entry in Store(Path("/nonexistent")).entries()}
WEATHER = ["get_weather", {"city": "Oslo", "days": 2}]
JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
# What a model of the family writes after its prompt, and the reasoning that is in it.
SAMPLES = {
    "qwen3-8b-fp8": ("<think>\nAsk the tool.\n</think>\n\n" + JSON_CALL, "Ask the tool."),
    "qwen3.8-27b-nvfp4": ("Ask the tool.\n</think>\n\n" + XML_CALL, "Ask the tool."),
    "qwen3-vl-4b": (JSON_CALL, None),
    "gpt-oss-20b": (
        "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}<|call|>',
        "Ask the tool.",
    ),
}


def asked(name: str, profile: Profile, parser: str | None = None, output: str | None = None) -> dict[str, object]:
    """A question to the program."""
    chosen = settings.load(profile=profile.name)
    if profile.name == "demo":  # its folder is there after scripts/demo only
        chosen = chosen.model_copy(update={"model": "org/m"})
    return {
        "name": name,
        "arguments": arguments(chosen, gpu=True),
        "tool_parser": parser or profile.tool_call_parser,
        "reasoning_parser": profile.reasoning_parser,
        "harmony": profile.name.startswith("gpt-oss"),
        "output": output or SAMPLES.get(profile.name, ("", None))[0],
    }


@pytest.fixture(scope="module")
def told() -> dict[str, dict]:
    """vLLM's answers for all recipes: importing it takes ten seconds and more, so once."""
    questions = [asked(name, profile) for name, profile in RECIPES.items()]
    swapped = asked("swapped", RECIPES["qwen3.8-27b-nvfp4"], parser="hermes")
    wrong = asked("wrong flag", RECIPES["qwen3-8b-fp8"])
    wrong["arguments"] = [*wrong["arguments"], "--moe-backend", "none-such"]
    text = json.dumps([*questions, swapped, wrong])
    done = subprocess.run([sys.executable, str(PROGRAM)], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_vllm_accepts_the_flags(told: dict[str, dict], name: str) -> None:
    assert told[name]["error"] is None


def test_vllm_refuses_a_wrong_one(told: dict[str, dict]) -> None:
    assert told["wrong flag"]["error"].startswith("argument --moe-backend: invalid choice: 'none_such'")


def test_vllm_has_every_method_and_key_of_speculation(told: dict[str, dict]) -> None:
    assert set(get_args(Method)) <= set(told["speculation"]["methods"])
    drafting = Speculation(method="draft_model", tokens=1, model="m").config()
    looking = Speculation(method="ngram", tokens=1, lookup_max=2, lookup_min=1).config()
    assert {*drafting, *looking} <= set(told["speculation"]["keys"])
    assert looking == {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_its_parser_reads_the_family_s_tool_call(told: dict[str, dict], name: str) -> None:
    assert told[name]["calls"] == [WEATHER]
    assert (told[name]["reasoning"] or "").strip() == (SAMPLES[name][1] or "")
    assert not (told[name]["content"] or "").strip()


def test_another_family_s_parser_loses_it(told: dict[str, dict]) -> None:
    """The fault that the test above guards against: no error, no call."""
    assert told["swapped"]["calls"] == []


def test_there_is_a_recipe_of_each_kind() -> None:
    assert set(SAMPLES) | {"demo"} == set(RECIPES)
    assert all(profile.tool_call_parser for name, profile in RECIPES.items() if name != "demo")
    assert RECIPES["gpt-oss-20b"].vllm["moe-backend"] == "marlin"
    for name, profile in RECIPES.items():
        assert profile.needs.device == ("cpu" if name == "demo" else "thor")
        assert profile.kv_cache_gib + 1 < profile.needs.memory_gib


def test_the_demo_is_what_scripts_demo_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance import demo, demo_model

    monkeypatch.chdir("/")
    words = demo.SERVE_FLAGS
    by_hand = settings.load(model=str(demo_model.model_path()), max_model_len=int(words[1]))
    assert words[0] == "--max-model-len"
    by_profile = settings.load(profile="demo")
    assert arguments(by_profile, gpu=False) == arguments(by_hand, gpu=False)
    assert by_profile.kv_cache_gib == 1  # the default of a CPU
