from pathlib import Path

import pytest

from appliance import settings
from appliance.command import arguments, build, served_name
from appliance.errors import SettingsError
from appliance.log import Redactor, secrets_of


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"MJOLNIR_PORT": "abc"}, "port='abc': accepted: a valid integer (--port or MJOLNIR_PORT)"),
        ({"MJOLNIR_PORT": "70000"}, "port='70000': accepted: less than or equal to 65535 (--port or MJOLNIR_PORT)"),
        ({"MJOLNIR_PROT": "80"}, "MJOLNIR_PROT: there is no such setting; did you mean MJOLNIR_PORT?"),
        (
            {"MJOLNIR_LOG_LEVEL": "loud"},
            "log_level='loud': accepted: 'debug', 'info', 'warning' or 'error' (--log-level or MJOLNIR_LOG_LEVEL)",
        ),
        ({"MJOLNIR_ENGINE_ARGS": "--x 'open"}, None),
    ],
)
def test_a_mistake_costs_one_line(monkeypatch, variables, line):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        settings.load()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert str(caught.value) == line if line else "MJOLNIR_ENGINE_ARGS" in str(caught.value)


def test_an_unknown_name_in_the_env_file_is_refused(tmp_path):
    file = tmp_path / ".env"
    file.write_text("HF_TOKEN=x\nMJOLNIR_MODLE=y\n")
    with pytest.raises(SettingsError, match="MJOLNIR_MODLE: there is no such setting; did you mean MJOLNIR_MODEL"):
        settings.load(file)


def test_flag_wins_over_environment_over_file(monkeypatch, tmp_path):
    file = tmp_path / ".env"
    file.write_text("MJOLNIR_PORT=1\nMJOLNIR_HOST=file\nMJOLNIR_MODEL=file\nMJOLNIR_DRAIN_SECONDS=\n")
    monkeypatch.setenv("MJOLNIR_PORT", "2")
    monkeypatch.setenv("MJOLNIR_HOST", "environment")
    got = settings.load(file, port=3, host=None)
    assert (got.port, got.host, got.model, got.drain_seconds) == (3, "environment", "file", 30.0)


def test_variables_of_the_backend_are_neither_refused_nor_lost(monkeypatch, tmp_path):
    file = tmp_path / ".env"
    file.write_text("MJOLNIR_ATTN_DISABLE=1\nMJOLNIR_KV_SCALES=/s\n")
    for name in ("MJOLNIR_ATTN_FALLBACK", "MJOLNIR_CONFIG", "MJOLNIR_LM_HEAD", "MJOLNIR_PORT"):
        monkeypatch.setenv(name, "7")
    assert settings.load(file).port == 7
    engine = settings.engine_environment(file)
    assert engine["MJOLNIR_ATTN_DISABLE"] == "1"
    assert (engine["MJOLNIR_KV_SCALES"], engine["MJOLNIR_ATTN_FALLBACK"], engine["MJOLNIR_CONFIG"]) == ("/s", "7", "7")
    assert "MJOLNIR_PORT" not in engine


def test_settings_can_not_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        settings.load().port = 1


def test_engine_args_are_cut_as_a_shell_does(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ENGINE_ARGS", "--seed 3 --hf-overrides '{\"a\": 1}'")
    assert settings.load().engine_args == ("--seed", "3", "--hf-overrides", '{"a": 1}')


def test_a_flag_of_the_users_takes_the_place_of_ours(model):
    ours = settings.load(model=str(model), max_model_len=64)
    assert arguments(ours, gpu=True) == (
        *(str(model), "--served-model-name", "fake-model", "--kv-cache-dtype", "fp8"),
        *("--attention-backend", "MJOLNIR", "--max-model-len", "64"),
    )
    theirs = settings.load(model=str(model), engine_args=("--dtype=float32", "--kv_cache_dtype", "auto"))
    words = arguments(theirs, gpu=False)
    assert words.count("bfloat16") == 0
    assert "fp8" not in words
    assert words[-3:] == ("--dtype=float32", "--kv_cache_dtype", "auto")


def test_defaults_of_a_cpu(model, monkeypatch, tmp_path):
    monkeypatch.setattr("appliance.command.has_gpu", lambda: False)
    launch = build(settings.load(model=str(model), kv_cache_gib=3), {}, tmp_path, tmp_path / "stats")
    assert launch.command.count("--enforce-eager") == 1
    assert launch.command[launch.command.index("--dtype") + 1] == "bfloat16"
    assert launch.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert launch.environment["MJOLNIR_STATS_DIR"] == str(tmp_path / "stats")
    assert launch.command[-2:] == ("--uds", str(tmp_path / "engine.sock"))


@pytest.mark.parametrize(
    ("inherited", "program", "found"),
    [({}, None, "1"), ({}, "/usr/bin/g++", None), ({"TORCH_COMPILE_DISABLE": "0"}, None, "0")],
)
def test_without_a_compiler_nothing_is_compiled_on_a_cpu(model, monkeypatch, tmp_path, inherited, program, found):
    """vLLM's sampler would, for log-probabilities."""
    monkeypatch.setattr("appliance.command.has_gpu", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: {"g++": program}[name])
    launch = build(settings.load(model=str(model)), inherited, tmp_path, tmp_path / "stats")
    assert launch.environment.get("TORCH_COMPILE_DISABLE") == found


@pytest.mark.parametrize("flag", ["--enforce-eager", "--no-enforce-eager"])
def test_compiling_is_the_users_choice(model, flag):
    words = arguments(settings.load(model=str(model), engine_args=(flag,)), gpu=False)
    assert [word for word in words if "enforce" in word] == [flag]


def test_defaults_of_a_gpu(model, monkeypatch, tmp_path):
    monkeypatch.setattr("appliance.command.has_gpu", lambda: True)
    launch = build(settings.load(model=str(model), kv_cache_gib=3), {}, tmp_path, tmp_path)
    assert launch.command[launch.command.index("--kv-cache-memory-bytes") + 1] == str(3 * 2**30)
    assert "--dtype" not in launch.command
    assert "VLLM_CPU_KVCACHE_SPACE" not in launch.environment


def test_the_engine_gets_no_secret_that_it_does_not_need(model, tmp_path):
    inherited = {"HF_TOKEN": "t", "VLLM_API_KEY": "k", "PATH": "/bin"}
    local = build(settings.load(model=str(model)), inherited, tmp_path, tmp_path).environment
    assert {"HF_TOKEN", "VLLM_API_KEY"} & set(local) == set()
    hub = build(settings.load(model="org/name"), inherited, tmp_path, tmp_path).environment
    assert "HF_TOKEN" in hub
    assert "HF_HUB_OFFLINE" not in hub
    offline = build(settings.load(model="org/name", offline=True), inherited, tmp_path, tmp_path).environment
    assert (offline["HF_HUB_OFFLINE"], offline["TRANSFORMERS_OFFLINE"]) == ("1", "1")


@pytest.mark.parametrize(
    ("given", "name"), [({"model": "org/name"}, "org/name"), ({"served_model_name": "n", "model": "/x"}, "n")]
)
def test_served_name(given, name):
    assert served_name(settings.load(**given)) == name


def test_served_name_of_a_folder(model):
    assert served_name(settings.load(model=f"{model}/")) == Path(model).name


def test_secrets_are_masked():
    words = ["--api-key", "key-one", "key-two", "--seed", "12345", "--hf_token=hf_abc"]
    secrets = secrets_of(words, {"HF_TOKEN": "from-env", "TOKENIZERS_PARALLELISM": "false", "WEBUI_SECRET": ""})
    assert secrets == {"key-one", "key-two", "hf_abc", "from-env"}
    masked = Redactor(secrets)("args: key-one, key-two hf_abc 12345 from-env")
    assert masked == "args: ***, *** *** 12345 ***"
    assert Redactor([])("text") == "text"


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_variable_overrides_nothing(monkeypatch, blank):
    """MJOLNIR_MODEL= in the environment once left the model of .env unused."""
    Path(".env").write_text("MJOLNIR_MODEL=from-file\nHF_TOKEN=token\n")
    for name in ("MJOLNIR_MODEL", "MJOLNIR_PORT", "HF_TOKEN"):
        monkeypatch.setenv(name, blank)
    found = settings.load()
    assert (found.model, found.port) == ("from-file", 8000)
    assert not found.model_fields_set & {"port"}
    assert settings.engine_environment()["HF_TOKEN"] == "token"  # noqa: S105
