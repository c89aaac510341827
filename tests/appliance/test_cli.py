"""`mjolnir` as a user starts it: a process of its own, signals, exit codes, one line on stderr."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from appliance.processes import has_variable
from tests.appliance.conftest import FAKE

MJOLNIR = (sys.executable, "-m", "appliance.cli")


class Served:
    """A running `mjolnir serve`."""

    def __init__(self, process: subprocess.Popen, stats: Path) -> None:
        self.process = process
        self.log = ""
        self._stats = stats
        self._mark = f"MJOLNIR_STATS_DIR={stats / str(process.pid)}"

    def read_until(self, pattern: str, seconds: float = 60.0) -> re.Match:
        """Wait for a line of its log."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.log)):
            ready, _, _ = select.select([self.process.stderr], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stderr.fileno(), 65536) if ready else b""
            assert data, f"{pattern!r} did not come:\n{self.log}"
            self.log += data.decode()
        return match

    def url(self) -> str:
        return self.read_until(r"ready after [\d.]+ s: \S+ at (\S+)/v1\n")[1]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url() + path, timeout=10) as answer:
            return answer.read().decode()

    def engine_processes(self) -> list[int]:
        return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and has_variable(int(pid), self._mark)]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.log += self.process.communicate(timeout=60)[1].decode()
        return self.process.returncode


@pytest.fixture
def command(model, tmp_path):
    """Command line of an appliance with the fake engine."""

    def build(*flags: str, **options: object) -> list[str]:
        given = {"model": model, "port": 0, "cache-dir": tmp_path / "cache", "stats-dir": tmp_path / "stats", **options}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [*MJOLNIR, "serve", *words, "--", *flags]

    return build


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "MJOLNIR_ENGINE_COMMAND": f"{sys.executable} {FAKE}", "MJOLNIR_BACKOFF_SECONDS": "0.05"}


@pytest.fixture
def serve(command, environment, tmp_path):
    started = []

    def start(*flags: str, **options: object) -> Served:
        process = subprocess.Popen(command(*flags, **options), env=environment, stderr=subprocess.PIPE)
        started.append(Served(process, tmp_path / "stats"))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate()


def run(words: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(serve, number, tmp_path):
    served = serve("--setsid-child")
    url = served.url()
    served.read_until(rf"curl {url}/v1/chat/completions")
    assert len(served.engine_processes()) == 3  # keeper, engine, and its child
    assert served.end(number) == 0
    assert served.engine_processes() == []
    assert "draining -> stopped" in served.log
    assert list((tmp_path / "stats").iterdir()) == []


def test_a_second_signal_ends_it_at_once(serve):
    """The engine is deaf to SIGTERM and the default gives it 20 seconds."""
    served = serve("--ignore-sigterm", "-1")
    served.url()
    began = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    served.read_until("ready -> draining")  # two equal signals at once would be one
    assert served.end(signal.SIGINT) == 0
    assert time.monotonic() - began < 10
    assert served.engine_processes() == []


def test_an_engine_does_not_outlive_a_killed_supervisor(serve):
    served = serve("--setsid-child")
    served.url()
    pids = served.engine_processes()
    assert len(pids) == 3
    descriptors = [os.pidfd_open(pid) for pid in pids]
    served.process.kill()
    deadline = time.monotonic() + 20
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], deadline - time.monotonic())[0], "a process of the engine is left"
        os.close(descriptor)


def test_leftovers_of_a_killed_supervisor_go_with_the_next_start(serve, tmp_path):
    first = serve()
    first.url()
    first.process.kill()
    first.process.wait()
    assert [path.name for path in (tmp_path / "stats").iterdir()] == [str(first.process.pid)]
    second = serve()
    second.url()
    assert [path.name for path in (tmp_path / "stats").iterdir()] == [str(second.process.pid)]


def test_lines_of_the_engine_are_prefixed_and_secrets_masked(serve, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "tops3cret")
    served = serve("--secret", "tops3cret")
    served.url()
    served.read_until(r"\[engine\] \(APIServer pid=10\) INFO .* non-default args: api_key=\*\*\*\n")
    assert "tops3cret" not in served.get("/status")
    served.end(signal.SIGTERM)
    assert "tops3cret" not in served.log


def test_it_does_not_wait_for_whoever_reads_its_log(serve):
    """A terminal that was stopped with Ctrl-S: nobody reads, and requests are answered all the same."""
    served = serve("--repeat-line", "x" * 8000)
    served.url()
    said = 0
    while said < 30:  # three times what a pipe holds
        said = sum(line.startswith("xxx") for line in json.loads(served.get("/status"))["log_tail"])
        time.sleep(0.05)  # nothing tells when a pipe is full
    assert served.end(signal.SIGTERM) == 0


def test_while_it_drains_it_still_answers(serve):
    """uvicorn's own signal handlers would close the port at once."""
    served = serve()
    url = served.url()
    chunks = [f"data: {number}\n\n" for number in range(40)]
    body = json.dumps({"script": {"chunks": chunks, "gap": 0.05}}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=30) as stream:
        served.process.send_signal(signal.SIGTERM)
        served.read_until("ready -> draining")
        begun = [stream.readline() for _ in range(30)]  # 15 events, which take longer than uvicorn's look-out
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/v1/completions", b"{}", timeout=10)
        assert refused.value.code == 503
        refused.value.close()
        assert json.loads(served.get("/status"))["state"] == "draining"
        assert b"".join(begun) + stream.read() == "".join(chunks).encode()
    assert served.process.wait(30) == 0


@pytest.mark.parametrize("option", ["json", "table"])
def test_status_of_a_running_appliance(serve, option):
    served = serve()
    words = [*MJOLNIR, "status", "--url", served.url(), *(["--json"] if option == "json" else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    if option == "json":
        assert json.loads(done.stdout)["state"] == "ready"
    else:
        assert re.search(r"state +ready", done.stdout)
        assert re.search(r"steps on T5 +0 of 0", done.stdout)


def test_status_without_an_appliance():
    code, stderr = run([*MJOLNIR, "status", "--url", "http://127.0.0.1:9"])
    assert (code, stderr.count("\n")) == (1, 1)
    assert stderr.startswith("mjolnir: no appliance answers at http://127.0.0.1:9/status: ")


def test_a_wrong_model_path_costs_one_line(command, environment, tmp_path):
    code, stderr = run(command(model=tmp_path / "nowhere"), environment)
    assert (code, stderr) == (1, f"mjolnir: {tmp_path}/nowhere: no such model folder\n")


def test_a_port_in_use_costs_one_line(command, environment):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stderr = run(command(port=port), environment)
    last = stderr.splitlines()[-1]
    assert (code, last) == (
        2,
        f"mjolnir: port={port}: Address already in use on 127.0.0.1; accepted: a free port (--port)",
    )
    assert "[engine]" not in stderr


def test_an_engine_that_can_not_be_started_costs_a_last_word(command, environment):
    code, stderr = run(command("--fail-start", "ValueError: no such quantisation"), environment)
    assert code == 1
    assert stderr.splitlines()[-1] == "mjolnir: the engine ended (exit code 1): ValueError: no such quantisation"


def test_an_unknown_setting_costs_one_line(command, environment):
    code, stderr = run(command(), environment | {"MJOLNIR_PROT": "1"})
    assert (code, stderr) == (2, "mjolnir: MJOLNIR_PROT: there is no such setting; did you mean MJOLNIR_PORT?\n")


def test_a_hub_id_is_refused_offline(environment):
    code, stderr = run([*MJOLNIR, "serve", "--model", "org/name", "--offline"], environment)
    assert code == 2
    assert stderr.startswith("mjolnir: model='org/name': a hub id can't be used offline")


def test_version():
    assert subprocess.check_output([*MJOLNIR, "version"], text=True) == "mjolnir 0.1.0\n"


def test_the_supervisor_never_imports_vllm_or_torch():
    code = (
        "import sys, appliance.cli, appliance.serve, appliance.settings;"
        "print([m for m in ('vllm', 'torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_command_line_alone_imports_no_web_framework():
    code = "import sys, appliance.cli; print([m for m in ('fastapi', 'aiohttp', 'uvicorn') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_progress_on_a_terminal(command, environment):
    """With a terminal on stderr there is a bar, and the engine's own chatter is left out."""
    control, terminal = os.openpty()
    process = subprocess.Popen(command(), env=environment | {"TERM": "xterm", "COLUMNS": "200"}, stderr=terminal)
    os.close(terminal)
    seen = ""
    with contextlib.suppress(OSError):  # EIO: the terminal's last user has ended
        while data := os.read(control, 65536):
            seen += data.decode()
            if "curl http" in seen and process.poll() is None:
                process.send_signal(signal.SIGTERM)
    os.close(control)
    assert process.wait(60) == 0
    assert "ready after" in seen
    assert "Resolved architecture" not in seen


def test_the_version_verifies_the_installed_vllm(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "version", "--verify", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["vllm"].startswith("verified: ")
    # Another vLLM in front: nothing of it is imported, and it is refused.
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "version", "--verify"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith(f"mjolnir: {tmp_path}")
    assert done.stderr.count("\n") == 1
