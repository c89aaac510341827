"""`mjolnir profiles …` as a user types it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.lifecycle import State
from tests.appliance.test_profiles_file import GOOD, write
from tests.appliance.test_profiles_http import ADMIN, profiles  # noqa: F401  (a fixture)

MJOLNIR = (sys.executable, "-m", "appliance.cli", "profiles")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MJOLNIR_PROFILES_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def run(*words: str) -> tuple[int, str, str]:
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run([*MJOLNIR, *words], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


async def run_beside(*words: str) -> tuple[int, str, str]:
    """The same while an appliance runs in this process."""
    return await asyncio.to_thread(run, *words)


def test_list(folder: Path) -> None:
    write(folder, GOOD.replace("name: p", "name: demo"), "demo")
    write(folder, "name: [", "broken")
    code, out, _ = run("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["demo"] == {"name": "demo", "from": "yours, hides a shipped one", "usable": True, "description": "one"}
    assert (rows["broken"]["usable"], rows["qwen3-8b-fp8"]["from"]) == (False, "shipped")
    code, out, _ = run("list")
    assert code == 0
    assert any(line.split()[:2] == ["demo", "yours,"] for line in out.splitlines())


def test_show(folder: Path) -> None:
    code, out, _ = run("show", "qwen3.8-27b-nvfp4", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["speculation"] == {"method": "mtp", "tokens": 3}
    assert told["flags"][-1] == "--language-model-only"
    code, out, _ = run("show", "gpt-oss-20b")
    assert code == 0
    assert "--tool-call-parser openai --reasoning-parser openai_gptoss --moe-backend marlin" in out


def test_check(folder: Path, model: Path) -> None:
    text = GOOD.replace("org/m", str(model)).replace("memory_gib: 1", "memory_gib: 0.01")
    file = write(folder, text)
    assert run("check", "p") == (0, "p: nothing is in its way here\n", "")
    assert run("check", str(file))[0] == 0
    (model / "tokenizer.json").unlink()
    code, out, _ = run("check", "p", "--json")
    assert code == 1
    assert json.loads(out)["problems"][0].startswith(f"{model}: no tokenizer")
    write(folder, text.replace("cpu", "cqu"))
    code, out, error = run("check", "p")
    assert (code, out) == (2, "")
    assert error == f"mjolnir: {file}:4: needs.device='cqu': accepted: 'thor', 'gpu' or 'cpu'\n"
    assert run("check", "none")[0] == 2


def test_use_without_an_appliance_says_how_to_set_it() -> None:
    code, _, error = run("use", "demo", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "for the next start: MJOLNIR_PROFILE=demo in .env, or `mjolnir serve --profile demo`" in error
    assert run("use", "demo", "--url", "ftp://x")[0] == 2


async def test_use(appliance, profiles, tmp_path: Path) -> None:  # noqa: F811
    profiles("two", seed=2)
    profiles("bad", **{"fail-start": "RuntimeError: no kernel image"})
    keys = tmp_path / "admin-keys"
    keys.write_text(f"op:{ADMIN}\n")
    keys.chmod(0o600)
    async with appliance(profiles_dir=tmp_path / "profiles", admin_keys_file=keys) as running:
        await running.states.reach(State.READY)
        address = ("--url", running.url)
        code, _, error = await run_beside("use", "two", *address)
        assert (code, error) == (2, "mjolnir: this needs a valid API key: Authorization: Bearer KEY\n")
        address = (*address, "--admin-key-file", str(keys))
        code, out, _ = await run_beside("use", "two", *address)
        assert (code, out) == (0, "two: ready\n")
        code, out, error = await run_beside("use", "bad", "--json", *address)
        outcome = json.loads(out)
        assert (code, outcome["state"], outcome["current"]) == (1, "returned", "two")
        assert "bad did not take over, the engine from before runs: " in error
        assert "no kernel image" in error
        code, _, error = await run_beside("use", "none", *address)
        assert code == 2
        assert "profile='none': there is none; accepted: bad, demo, " in error


def test_serve_takes_a_profile(folder: Path, model: Path) -> None:
    write(folder, GOOD.replace("org/m", str(model / "gone")))
    environment = {
        **os.environ,
        "MJOLNIR_PROFILE": "p",
        "MJOLNIR_CACHE_DIR": str(folder),
        "MJOLNIR_STATS_DIR": str(folder),
    }
    words = [sys.executable, "-m", "appliance.cli", "serve", "--port", "0"]
    for more, code, told in (
        ([], 1, f"{model / 'gone'}: no such model folder"),
        (["--profile", "none"], 2, "profile='none': there is none"),
    ):
        done = subprocess.run([*words, *more], capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert done.returncode == code
        assert told in done.stderr.splitlines()[-1]
