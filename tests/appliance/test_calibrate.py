"""`mjolnir calibrate` and how `mjolnir serve` finds scales, with stand-ins for the process that runs the model."""

import json
import sys
from pathlib import Path

import pytest

from appliance import calibrate, command
from appliance.calibrate import Choices, read_prompts
from appliance.errors import EngineError, SettingsError
from appliance.settings import Settings
from mjolnir import calibration, scales

SHAPE = scales.ModelShape(name="Tiny", architecture="LlamaForCausalLM", num_kv_heads=1, head_size=4)
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "head_dim": 4, "hidden_size": 4}


def write_scales(path: Path, shape: scales.ModelShape = SHAPE) -> None:
    layer = scales.LayerScales(k=[[1.0] * 4], v=[[2.0] * 4], k_fp8=0.5, v_fp8=0.5)
    made = scales.Origin(method="max", tokens=7, version="0.1.0")
    scales.write(path, scales.ScaleFile(model=shape, made=made, layers={"layers.0": layer}))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "Tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    return Settings(model=str(model), cache_dir=tmp_path / "cache", kv_cache_dtype="fp6_e2m3")


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have a program run in place of the model; it sees the request as its last argument."""
    monkeypatch.setattr(calibrate, "_command", lambda request: (sys.executable, "-c", code, json.dumps(request)))


def test_the_mark_is_the_childs() -> None:
    assert calibrate.MARK == calibration.MARK
    assert calibration.__name__ == calibrate.MODULE


def test_writes_where_serve_looks(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    target = scales.default_path(settings.cache_dir, settings.model)
    code = (
        "import json, sys; request = json.loads(sys.argv[1]); print('a line of the log');"
        f"print({calibrate.MARK!r} + json.dumps({{'done': 64, 'total': len(request['prompts'])}}));"
        f"print({calibrate.MARK!r} + json.dumps({{'written': request['out']}}))"
    )
    child(monkeypatch, code)
    write_scales(target)  # what the child would have done
    assert calibrate.calibrate(settings, Choices()) == {"path": str(target), "layers": 1, "tokens": 7}
    assert list((settings.cache_dir / "calibration").iterdir()) == []
    assert command.scales_environment(settings, {}) == {"MJOLNIR_KV_SCALES": str(target)}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f'print({calibrate.MARK!r} + \'{{"error": "K of layers.0 has 3 values that are NaN"}}\')', "K of layers.0 ha"),
        ("raise MemoryError('no room for the weights')", "MemoryError: no room for the weights"),
        ("pass", "the model did not run to the end"),
    ],
)
def test_a_failure_is_one_line_and_batches_stay(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    child(monkeypatch, code)
    with pytest.raises(EngineError, match=message):
        calibrate.calibrate(settings, Choices())
    assert len(list((settings.cache_dir / "calibration").iterdir())) == 1
    assert not scales.default_path(settings.cache_dir, settings.model).exists()


def test_no_scales_is_one_line_with_what_to_do(settings: Settings) -> None:
    with pytest.raises(SettingsError, match=r"no scales for .*Tiny\.json is missing; make it with `mjolnir calibrate"):
        command.scales_environment(settings, {})


def test_scales_of_another_model_stop_the_start(settings: Settings, tmp_path: Path) -> None:
    write_scales(tmp_path / "other.json", SHAPE.model_copy(update={"head_size": 4, "name": "Other"}))
    with pytest.raises(SettingsError, match="made for a model with name 'Other'; accepted: 'Tiny'"):
        command.scales_environment(settings, {"MJOLNIR_KV_SCALES": str(tmp_path / "other.json")})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((), "fp6_e2m3"),
        (("--kv-cache-dtype", "fp8"), "fp8"),
        (("--kv-cache-dtype=auto",), "auto"),
        (("--kv_cache_dtype", "fp8"), "fp8"),
        (("--enforce-eager", "--seed", "1"), "fp6_e2m3"),
    ],
)
def test_a_flag_takes_the_place_of_the_setting(settings: Settings, given: tuple[str, ...], found: str) -> None:
    assert command.kv_cache_dtype(settings.model_copy(update={"engine_args": given})) == found


def test_other_formats_need_no_scales(settings: Settings) -> None:
    assert command.scales_environment(settings.model_copy(update={"kv_cache_dtype": "fp8"}), {}) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 is no prompt"),
        ("\n", "it is empty"),
        ('{"prompt": " "}\n', "line 1 is no prompt"),
        ("nonsense\n", r'line 1 is no prompt; accepted: a line of JSON for each prompt, {"prompt": "..."}'),
    ],
)
def test_bad_prompt_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(SettingsError, match=message):
        read_prompts(tmp_path / "prompts.jsonl")


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b", "source": "x"}\n')
    assert read_prompts(tmp_path / "prompts.jsonl") == ["a", "b"]
    with pytest.raises(SettingsError, match=r"none\.jsonl: .*No such file"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("changes", [{"percentile": 0}, {"percentile": 101}, {"answer_tokens": 0}])
def test_bad_choices(changes: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="accepted: "):
        Choices(**changes)
