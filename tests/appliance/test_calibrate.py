"""`mjolnir calibrate` and how `mjolnir serve` finds scales, with stand-ins for the process that runs the model."""

import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from appliance import calibrate, command, serve
from appliance.calibrate import Choices, read_prompts
from appliance.errors import EngineError, SettingsError, StoppedError
from appliance.settings import Settings
from mjolnir import calibration, scales
from mjolnir.calibration_prompts import PROMPTS

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
    seen: list[tuple[int, int]] = []
    report = calibrate.calibrate(settings, Choices(), lambda *done: seen.append(done))
    assert report == {"path": str(target), "layers": 1, "tokens": 7}
    assert seen == [(64, len(PROMPTS))]
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
        calibrate.calibrate(settings, Choices(), ignore)
    assert len(list((settings.cache_dir / "calibration").iterdir())) == 1
    assert not scales.default_path(settings.cache_dir, settings.model).exists()


def test_no_scales_is_one_line_with_what_to_do(settings: Settings) -> None:
    with pytest.raises(SettingsError) as caught:
        command.scales_environment(settings, {})
    path = scales.default_path(settings.cache_dir, settings.model)
    assert str(caught.value) == (
        f"kv_cache_dtype=fp6_e2m3: there are no scales for {settings.model}: {path} is missing; make it with "
        f"`mjolnir calibrate --model {settings.model}`, or start with --calibrate, which does that first, or set "
        "MJOLNIR_KV_SCALES"
    )


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


def test_a_file_that_is_given_serves_fp8_too_and_is_checked(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"kv_cache_dtype": "fp8"})
    given = {"MJOLNIR_KV_SCALES": str(tmp_path / "scales.json")}
    write_scales(tmp_path / "scales.json")
    assert command.scales_environment(settings, given) == given
    (tmp_path / "scales.json").write_text('{"format": "mjolnir.kv_sc')
    with pytest.raises(SettingsError, match="not whole JSON"):
        command.scales_environment(settings, given)
    assert command.scales_environment(settings.model_copy(update={"kv_cache_dtype": "auto"}), given) == {}


# `mjolnir serve --calibrate`


def ignore(*_: int) -> None:
    """A follower that does not care."""


WRITES = (
    "import json, os, sys; request = json.loads(sys.argv[1]);"
    "os.makedirs(os.path.dirname(request['out']), exist_ok=True);"
)


def writing(shape: scales.ModelShape, folder: Path) -> str:
    """A child that writes a whole scale file, and what it was asked."""
    write_scales(folder / "made.json", shape)
    content = (folder / "made.json").read_text()
    return (
        f"{WRITES} open(request['out'], 'w').write({content!r});"
        f"open({str(folder / 'asked.json')!r}, 'w').write(sys.argv[1]);"
        f"print({calibrate.MARK!r} + json.dumps({{'done': 64, 'total': 64}}));"
        f"print({calibrate.MARK!r} + json.dumps({{'written': request['out']}}))"
    )


def test_serve_calibrates_first_and_then_finds_its_scales(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--enforce-eager", "--tensor-parallel-size", "2")
    settings = settings.model_copy(update={"calibrate": True, "max_model_len": 512, "engine_args": words})
    child(monkeypatch, writing(SHAPE, tmp_path))
    with caplog.at_level(logging.INFO):
        calibrate.calibrate_first(settings, {})
    path = scales.default_path(settings.cache_dir, settings.model)
    assert command.scales_environment(settings, {}) == {"MJOLNIR_KV_SCALES": str(path)}
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert (asked["max_model_len"], asked["tensor_parallel_size"]) == (512, 2)
    assert [record.getMessage() for record in caplog.records if record.name == "appliance.calibrate"] == [
        f"there are no scales for {settings.model} yet: calibrating, which takes minutes",
        "calibrated on 64 of 64 prompts",
        f"wrote {path}: 1 layers, 7 tokens",
    ]


@pytest.mark.parametrize(
    ("changes", "environment"),
    [
        ({"calibrate": False}, {}),
        ({"kv_cache_dtype": "fp8"}, {}),
        ({}, {"MJOLNIR_KV_SCALES": "/my/own.json"}),
        ({"engine_variables": {"MJOLNIR_KV_SCALES": "/my/own.json"}}, {}),
    ],
)
def test_serve_calibrates_only_where_scales_are_its_own_to_make(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], environment: dict[str, str]
) -> None:
    child(monkeypatch, "raise SystemExit('started')")
    calibrate.calibrate_first(settings.model_copy(update={"calibrate": True} | changes), environment)
    assert not (settings.cache_dir / "calibration").exists()


def test_serve_leaves_good_scales_alone_and_makes_bad_ones_anew(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings.model_copy(update={"calibrate": True})
    path = scales.default_path(settings.cache_dir, settings.model)
    write_scales(path)
    child(monkeypatch, "raise SystemExit('started')")
    calibrate.calibrate_first(settings, {})
    write_scales(path, SHAPE.model_copy(update={"num_kv_heads": 1, "architecture": "Other"}))
    before = path.read_bytes()
    with pytest.raises(EngineError, match="calibration: "):
        calibrate.calibrate_first(settings, {})
    assert path.read_bytes() == before  # what fails takes nothing away
    child(monkeypatch, writing(SHAPE, tmp_path))
    calibrate.calibrate_first(settings, {})
    assert scales.load(path).model == SHAPE
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert warnings[0].endswith("; calibrating anew")


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ((), 1),
        (("-tp", "4"), 4),
        (("--tensor-parallel-size=2", "--seed", "1"), 2),
        (("--tensor_parallel_size", "8"), 8),
        (("--tensor-parallel-size", "many"), 1),
    ],
)
def test_ranks_are_the_engines(words: tuple[str, ...], size: int) -> None:
    assert calibrate._tensor_parallel_size(words) == size


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_child_and_says_how_to_go_on(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    code = (
        f"import os, signal; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()));"
        f'print({calibrate.MARK!r} + \'{{"done": 8, "total": 64}}\', flush=True); signal.pause()'
    )
    child(monkeypatch, code)
    before = signal.getsignal(signal.SIGTERM)
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(StoppedError) as caught:
            calibrate.calibrate(settings, Choices(), lambda *_: os.kill(os.getpid(), number))
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert str(caught.value) == "calibration: stopped after 8 of 64 prompts; the same command goes on there"
    assert signal.getsignal(signal.SIGTERM) is before
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert len(list((settings.cache_dir / "calibration").iterdir())) == 1


def test_a_cache_folder_that_can_not_be_written_is_one_line(settings: Settings) -> None:
    settings.cache_dir.write_text("a file")
    with pytest.raises(SettingsError, match=r"cache_dir='.*': Not a directory; accepted: a folder to write to"):
        calibrate.calibrate(settings, Choices(), ignore)


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


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `mjolnir serve` does, with nothing behind it."""
    seen: list[str] = []
    monkeypatch.setattr(serve.preflight, "check_settings", lambda _: seen.append("check"))
    monkeypatch.setattr(serve, "calibrate_first", lambda *_: seen.append("calibrate"))
    monkeypatch.setattr(serve, "_run", lambda *_: None)
    monkeypatch.setattr(serve.uvloop, "run", lambda _: seen.append("serve"))
    return seen


@pytest.mark.parametrize("wanted", [True, False])
def test_serve_calibrates_after_the_checks_and_before_it_listens(
    settings: Settings, order: list[str], wanted: bool
) -> None:
    serve.serve(settings.model_copy(update={"calibrate": wanted, "port": 0}))
    assert order == (["check", "calibrate", "serve"] if wanted else ["check", "serve"])


def test_a_stop_while_it_calibrates_ends_serve_like_any_stop(
    settings: Settings, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise StoppedError("calibration: stopped after 8 of 64 prompts")

    monkeypatch.setattr(serve, "calibrate_first", stopped)
    serve.serve(settings.model_copy(update={"calibrate": True, "port": 0}))
    assert order == ["check"]


def test_a_port_that_is_taken_shows_before_a_calibration(settings: Settings, order: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        update = {"calibrate": True, "port": taken.getsockname()[1]}
        with pytest.raises(SettingsError, match="Address already in use"):
            serve.serve(settings.model_copy(update=update))
    assert order == ["check"]
