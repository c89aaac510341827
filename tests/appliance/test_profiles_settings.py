"""From a profile to the engine's command line, and who wins where the operator says something too."""

from pathlib import Path

import pytest

from appliance import serve, settings
from appliance.command import arguments, build
from appliance.errors import ModelError, SettingsError
from appliance.profiles import choice
from appliance.profiles.fit import findings, warnings
from appliance.profiles.loader import load
from appliance.profiles.schema import Needs, Profile
from tests.appliance.test_profiles_file import GOOD, write

FULL = """\
name: p
description: one
model: org/m
served_model_name: m
kv_cache_dtype: auto
kv_cache_gib: 3
max_model_len: 64
max_num_seqs: 2
attention_backend: TRITON_ATTN
speculation: {method: eagle3, tokens: 2, model: org/draft}
tool_call_parser: hermes
reasoning_parser: qwen3
chat_template_kwargs: {enable_thinking: false}
vllm:
  seed: 7
  enable_prefix_caching: false
  language-model-only: true
  limit-mm-per-prompt: {image: 1}
  cudagraph-capture-sizes: [1, 2]
environment: {VLLM_LOGGING_LEVEL: DEBUG, MAX_JOBS: "2"}
needs: {device: cpu, memory_gib: 1}
"""
FLAGS = (
    *("--max-num-seqs", "2"),
    *("--speculative-config", '{"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 2}'),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    *("--cudagraph-capture-sizes", "1", "2", "--no-enable-prefix-caching", "--language-model-only"),
    *("--limit-mm-per-prompt", '{"image": 1}', "--seed", "7"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the profiles p and q."""
    monkeypatch.setenv("MJOLNIR_PROFILES_DIR", str(tmp_path / "profiles"))
    write(tmp_path / "profiles", FULL)
    write(tmp_path / "profiles", GOOD.replace("name: p", "name: q").replace("org/m", "org/q"), "q")
    return tmp_path / "profiles"


def test_every_key_reaches_the_command_line(folder: Path) -> None:
    got = settings.load(profile="p")
    assert arguments(got, gpu=True) == (
        *("org/m", "--served-model-name", "m", "--kv-cache-dtype", "auto", "--attention-backend", "TRITON_ATTN"),
        *("--max-model-len", "64", "--kv-cache-memory-bytes", str(3 << 30), *FLAGS),
    )
    assert got.engine_variables == {"VLLM_LOGGING_LEVEL": "DEBUG", "MAX_JOBS": "2"}
    assert (got.profile, got.given.profile, got.given.model) == ("p", "p", "")
    assert got == settings.load(profile="p")


def test_what_a_profile_leaves_out_is_the_default(folder: Path) -> None:
    got, plain = settings.load(profile="q"), settings.load()
    assert got.model == "org/q"
    for name in ("kv_cache_dtype", "kv_cache_gib", "max_model_len", "attention_backend", "engine_args"):
        assert getattr(got, name) == getattr(plain, name)


def test_command_line_over_environment_over_file_over_profile_over_default(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".env"
    file.write_text("MJOLNIR_PROFILE=p\nMJOLNIR_MAX_MODEL_LEN=1\nMJOLNIR_KV_CACHE_DTYPE=f\nMJOLNIR_KV_CACHE_GIB=11\n")
    monkeypatch.setenv("MJOLNIR_MAX_MODEL_LEN", "2")
    monkeypatch.setenv("MJOLNIR_KV_CACHE_GIB", "12")
    monkeypatch.setenv("MJOLNIR_ATTENTION_BACKEND", "")  # blank counts as not set
    got = settings.load(file, kv_cache_gib=13, model=None)
    assert (got.kv_cache_gib, got.max_model_len, got.kv_cache_dtype) == (13, 2, "f")
    assert (got.attention_backend, got.model, got.port) == ("TRITON_ATTN", "org/m", 8000)


def test_flags_are_merged_one_by_one(folder: Path) -> None:
    got = settings.load(profile="p", engine_args=("--seed=9", "--enable-prefix-caching", "--tool_call_parser", "x"))
    assert got.engine_args[-4:] == ("--seed=9", "--enable-prefix-caching", "--tool_call_parser", "x")
    for gone in ("7", "--seed", "--no-enable-prefix-caching", "--tool-call-parser"):
        assert gone not in got.engine_args
    assert "--language-model-only" in got.engine_args


def test_a_model_replaces_that_of_the_profile_beside_it_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a board without a network in place of the recipe's hub id; a switch brings the other's model."""
    monkeypatch.setenv("MJOLNIR_MODEL", "/models/m")
    monkeypatch.setenv("MJOLNIR_SERVED_MODEL_NAME", "mine")
    monkeypatch.setenv("MJOLNIR_MAX_MODEL_LEN", "9")
    at_start = settings.load(profile="p")
    assert (at_start.model, at_start.served_model_name, at_start.kv_cache_gib) == ("/models/m", "mine", 3)
    switched = settings.with_profile(at_start, "q")
    assert (switched.model, switched.served_model_name, switched.max_model_len) == ("org/q", "", 9)
    assert switched.kv_cache_gib is None  # nothing of the first profile stays
    assert settings.with_profile(switched, "p") == at_start
    none = settings.with_profile(switched, "")
    assert (none.model, none.profile, none.engine_args, none.engine_variables) == ("/models/m", "", (), {})


def test_what_is_replaced_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MJOLNIR_MODEL", "/models/m")
    got = settings.load(profile="p", engine_args=("--seed", "1"))
    assert warnings(got, {"MAX_JOBS": "4"}) == [
        "profile p: model='/models/m' (MJOLNIR_MODEL or the command line) replaces the profile's 'org/m'",
        "profile p: --seed in engine_args replaces the profile's",
        "profile p: MAX_JOBS in the environment replaces the profile's",
    ]
    assert warnings(settings.load(profile="q"), {}) == [
        "profile q: model='/models/m' (MJOLNIR_MODEL or the command line) replaces the profile's 'org/q'"
    ]
    assert warnings(settings.load(), {}) == []


def test_serve_warns_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MJOLNIR_MODEL", "/nowhere/m")
    with pytest.raises(ModelError):
        serve.serve(settings.load(profile="p", stats_dir=folder, cache_dir=folder))
    assert "profile p: model='/nowhere/m' (MJOLNIR_MODEL or the command line) replaces" in capfd.readouterr().err


def test_the_environment_wins_over_a_profile_s_variables(folder: Path, tmp_path: Path) -> None:
    launch = build(settings.load(profile="p"), {"MAX_JOBS": "8", "VLLM_LOGGING_LEVEL": ""}, tmp_path, tmp_path)
    assert (launch.environment["MAX_JOBS"], launch.environment["VLLM_LOGGING_LEVEL"]) == ("8", "DEBUG")


def test_an_unknown_profile_is_the_user_s_mistake(folder: Path) -> None:
    with pytest.raises(SettingsError, match="profile='x': there is none; accepted: demo, "):
        settings.load(profile="x")


def machine(tmp_path: Path, total: int, available: int, board: str = "") -> str:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {total << 20} kB\nMemAvailable: {available << 20} kB\n")
    (tmp_path / "proc/device-tree/model").write_text(board)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("device", "memory", "board", "gpu", "told"),
    [
        ("cpu", 10, "", False, []),
        ("thor", 100, "NVIDIA Jetson AGX Thor Developer Kit", True, []),
        ("thor", 10, "", True, [(False, "made for a Thor board, which this machine is not")]),
        ("thor", 10, "", False, [(True, "needs a thor: there is no NVIDIA GPU here")]),
        ("gpu", 10, "", False, [(True, "needs a gpu: there is no NVIDIA GPU here")]),
        ("cpu", 119, "", False, [(False, "needs 119 GiB of memory, 110.0 are available now")]),
        ("cpu", 130, "", False, [(True, "needs 130 GiB of memory, this machine has 122.0")]),
    ],
)
def test_what_does_not_fit(
    model: Path, tmp_path: Path, device: str, memory: float, board: str, gpu: bool, told: list[tuple[bool, str]]
) -> None:
    profile = Profile(name="p", description="d", model=str(model), needs=Needs(device=device, memory_gib=float(memory)))
    chosen = choice.apply(profile, settings.load())
    found = findings(profile, chosen, root=machine(tmp_path / "root", 122, 110, board), gpu=gpu)
    assert [(one.fatal, one.text) for one in found] == told


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path / "root", 9, 9)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    profile = load(write(tmp_path / "p", GOOD))
    hub = findings(profile, choice.apply(profile, settings.load()), root=root)
    assert [(one.fatal, one.text) for one in hub] == [
        (False, "model org/m is not in the hub's cache: the first start downloads it")
    ]
    offline = findings(profile, choice.apply(profile, settings.load(offline=True)), root=root)
    assert [(one.fatal, one.text) for one in offline] == [
        (True, "model org/m is a hub id, which can't be used offline; accepted: its folder")
    ]
    snapshot = tmp_path / "hub/models--org--m/snapshots/0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert findings(profile, choice.apply(profile, settings.load()), root=root) == []
    lost = profile.model_copy(update={"model": "/nowhere/m"})
    found = findings(lost, choice.apply(lost, settings.load()), root=root)
    assert [(one.fatal, one.text) for one in found] == [(True, "/nowhere/m: no such model folder")]
