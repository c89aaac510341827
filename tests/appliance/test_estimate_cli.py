"""`mjolnir estimate` as a user runs it: exit codes, one line for what is wrong, JSON and a table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.appliance import published_models as published


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(published.QWEN3_8B))
    return str(tmp_path)


def run(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.cli", "estimate", *arguments]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"} | ({"HF_HOME": str(home)} if home else {})
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_json(model: str) -> None:
    done = run(model, "--memory", "122GiB", "--sequences", "64", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["weights"]["size"] == 8_190_735_360 * 2
    assert found["weights"]["source"] == "config.json"
    room = int(122 * 2**30 * 0.92) - 8_190_735_360 * 2 - 2 * 2**30
    assert found["kv_cache"] == room
    assert found["fits"] is True
    fp8 = next(each for each in found["formats"] if each["format"] == "fp8")
    assert fp8["tokens"] == room // (16 * 73_728) * 16
    assert fp8["longest"] == (room // (16 * 73_728) - 1) // 64 * 16


def test_table(model: str) -> None:
    done = run(model, "--memory", "122GiB")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["fp8", "73,728", "-", "1,383,296", "40,960"] in lines
    assert "Qwen3ForCausalLM, 8.19 billion parameters" in done.stdout
    assert "15.26 GiB, bfloat16, by config.json" in done.stdout


def test_a_model_that_does_not_fit(model: str) -> None:
    """The figures are printed all the same."""
    done = run(model, "--memory", "16GiB", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["fits"] is False
    assert done.stderr == f"mjolnir: {model}: 15.3 GiB of weights leave nothing for the KV cache\n"


def test_a_context_that_does_not_fit(model: str) -> None:
    done = run(model, "--memory", "122GiB", "--kv-cache-gib", "1")
    assert done.returncode == 1
    assert done.stderr == (
        f"mjolnir: {model}: no format serves a context of 40,960 in 1.00 GiB; --max-model-len lowers it\n"
    )
    assert run(model, "--memory", "122GiB", "--kv-cache-gib", "1", "--max-model-len", "8192").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--memory", "plenty"), 2, "--memory='plenty': accepted: a number above 0 and a unit"),
        (("--memory", "1GiB", "--kv-cache-gib", "nan"), 2, "--kv-cache-gib=nan: accepted: GiB, 0 or more"),
        (("--memory", "1GiB", "--reserve-gib", "-1"), 2, "--reserve-gib=-1.0: accepted: GiB, 0 or more"),
        (("--memory", "1GiB", "--sequences", "0"), 2, "--sequences=0: accepted: a whole number above 0"),
    ],
)
def test_options_that_make_no_sense(model: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(model, *arguments)
    assert done.returncode == code
    assert done.stderr.startswith(f"mjolnir: {message}")
    assert done.stderr.count("\n") == 1


def test_models_that_are_none(tmp_path: Path) -> None:
    def stderr(model: str) -> tuple[int, str]:
        done = run(model, "--memory", "122GiB", home=tmp_path / "hub")
        return done.returncode, done.stderr

    (tmp_path / "empty").mkdir()
    assert stderr(str(tmp_path / "empty")) == (
        1,
        f"mjolnir: {tmp_path / 'empty'}: no config.json, so this is not a model folder\n",
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert stderr(str(tmp_path / "model.gguf"))[0] == 1
    code, line = stderr("/no/such/model")
    assert (code, line) == (
        2,
        "mjolnir: '/no/such/model': no such folder; accepted: a model's folder, or its id on the hub (owner/name)\n",
    )
    (tmp_path / "config.json").write_text("{")
    code, line = stderr(str(tmp_path))
    assert code == 1
    assert line.startswith(f"mjolnir: {tmp_path / 'config.json'}: not readable as JSON")
    (tmp_path / "config.json").write_text("[]")
    assert stderr(str(tmp_path)) == (1, f"mjolnir: {tmp_path / 'config.json'}: not a JSON object\n")


def test_ids_on_the_hub(tmp_path: Path) -> None:
    """Without --online nothing is asked of the hub; what its cache holds is used, and no weights are needed."""
    done = run("owner/model", "--memory", "122GiB", home=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "mjolnir: owner/model: its config.json is not in the local cache; --online fetches that one file\n",
    )
    commit = "0" * 40
    cached = tmp_path / "hub" / "models--owner--model"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit / "config.json").write_text(json.dumps(published.QWEN3_8B))
    assert run("owner/model", "--memory", "122GiB", home=tmp_path).returncode == 0
