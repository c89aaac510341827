"""The appliance with real vLLM and a random model of two layers, as a user runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import psutil
import pytest

from tests.appliance.test_cli import MJOLNIR, Served, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

START_SECONDS = 500.0  # on a busy machine of two cores
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hammer"}], "max_tokens": 12}
FLAGS = ("--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, Path(__file__).with_name("tiny_model.py"), folder], check=True, timeout=300)
    return folder


@pytest.fixture
def command(tiny, tmp_path):
    folders = ("--cache-dir", str(tmp_path / "cache"), "--stats-dir", str(tmp_path / "stats"))
    return [*MJOLNIR, "serve", "--model", str(tiny), "--port", "0", *folders, "--"]


def test_a_flag_that_vllm_does_not_know_is_named_before_the_engine_starts(command):
    code, stderr = run([*command, "--max-model-lenn", "256"])
    last = stderr.splitlines()[-1]
    assert code == 2
    assert last == "mjolnir: vLLM does not accept the engine's flags: unrecognized arguments: --max-model-lenn 256"
    assert "[engine]" not in stderr
    assert "starting" not in stderr


def test_start_chat_crash_restart_stop(command, tmp_path):
    process = subprocess.Popen([*command, *FLAGS], env={**os.environ}, stderr=subprocess.PIPE)
    served = Served(process, tmp_path / "stats")
    try:
        served.read_until(r"ready after", START_SECONDS)
        with openai.OpenAI(base_url=f"{served.url()}/v1", api_key="none", max_retries=0) as client:
            _chat(client)
            before = _samples(served.get("/metrics"))
            assert before["vllm:request_success_total"] >= 2
            assert before['mjolnir_t5_steps_total{kind="decode"}'] == 2 * (CHAT["max_tokens"] - 1)
            assert before['mjolnir_fallback_steps_total{reason="prefill"}'] == 2
            assert (tmp_path / "cache" / "accepted-flags.json").exists()

            _engine_core(served).kill()
            served.read_until(r"(?s)unknown: the engine's process VLLM::EngineCore ended.*ready after", START_SECONDS)
            _chat(client)
        after = _samples(served.get("/metrics"))
        assert after['appliance_engine_restarts_total{cause="unknown"}'] == 1
        assert after['mjolnir_t5_steps_total{kind="decode"}'] == 4 * (CHAT["max_tokens"] - 1)
        assert served.end(signal.SIGINT) == 0
        assert served.engine_processes() == []
    finally:
        process.kill()
        process.communicate()


def _chat(client: openai.OpenAI) -> None:
    """One answer at once and the same one as a stream."""
    options = {**CHAT, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**options)
    assert answer.usage.completion_tokens == CHAT["max_tokens"]
    with client.chat.completions.create(**options, stream=True) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 3
    assert "".join(pieces) == answer.choices[0].message.content


def _engine_core(served: Served) -> psutil.Process:
    return next(p for p in map(psutil.Process, served.engine_processes()) if p.name().startswith("VLLM::EngineCor"))


def _samples(page: str) -> dict[str, float]:
    """Samples by name with labels, and summed up by name alone."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
            plain = name.partition("{")[0]
            if plain != name:
                found[plain] = found.get(plain, 0.0) + float(value)
    return found
