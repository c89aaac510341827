"""From a checkout to a chat through compose, Prometheus, a killed engine, a restart, an upgrade and a way back.

Everything is real: image, compose, vLLM, Prometheus. The tests are one story in the order of the file.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docker.boards import ROOT, Board, Compose, free_port, until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

PROJECT = f"mjolnir-e2e-{os.getpid()}"
NAME = f"mjolnir-host-{os.getpid()}"
KILL_CORE = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if path.read_bytes().startswith(b"VLLM::EngineCore"):
        os.kill(int(path.parent.name), signal.SIGKILL)
        print(path.parent.name)
"""
SPOIL = "echo '#' >>$(find / -path '*/v1/attention/backends/registry.py' | head -1)"


@pytest.fixture(scope="module")
def composed(client: Any, cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Compose, Board]]:
    folder = tmp_path_factory.mktemp("compose")
    port = free_port()
    # What .env.example has, so that its empty lines are tried as well.
    lines = (line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if "=" in line)
    example = {name: value for name, value in lines if not name.startswith("#")}
    variables = {**example, "MJOLNIR_PORT": str(port), "APPLIANCE_CPU_IMAGE": cpu_image, "SHM_SIZE": "1gb"}
    compose = Compose(folder, PROJECT, "compose.yaml", variables)
    try:
        compose("--profile", "cpu", "up", "--detach", "--no-build")
        yield compose, Board(f"http://127.0.0.1:{port}")
    finally:
        compose("--profile", "cpu", "down", "--volumes", "--timeout", "60")


def container(client: Any) -> Any:
    (found,) = client.containers.list(all=True, filters={"label": f"com.docker.compose.project={PROJECT}"})
    return found


def test_compose_serves_the_demo(client: Any, composed: tuple[Compose, Board]) -> None:
    compose, board = composed
    started = json.loads(compose("ps", "--all", "--format", "json").splitlines()[0])
    assert started["Service"] == "mjolnir-cpu"
    until("ready", board.is_ready, fail=lambda: ended(client))
    assert "Paris" in board.chat()
    assert board.total("mjolnir_t5_steps_total", kind="decode") >= 1
    run = container(client).exec_run
    assert run(["id", "-u"]).output == b"1000\n"
    assert run(["touch", "/opt/mjolnir/x"]).exit_code != 0
    assert run(["touch", "/cache/x", "/models/x", "/tmp/x"]).exit_code == 0
    assert run(["python3", "/opt/mjolnir/healthcheck.py"]).output == b"/health answers 200\n"
    facts = container(client).attrs
    limits = facts["HostConfig"]
    assert facts["Config"]["User"] == "1000"
    assert (limits["Privileged"], limits["ReadonlyRootfs"], limits["CapDrop"]) == (False, True, ["ALL"])
    assert not any("docker.sock" in str(mount) for mount in facts["Mounts"])


def ended(client: Any) -> str:
    one = container(client)
    return "" if one.status in ("running", "created") else f"the container ended: {one.logs(tail=5).decode()}"


def test_prometheus_scrapes_what_the_alerts_ask_for(composed: tuple[Compose, Board], tmp_path: Path) -> None:
    _, board = composed
    with prometheus(tmp_path, board) as query:
        until("up", lambda: query("up")["value"] == "1", 60)
        assert query('appliance_engine_state{appliance_engine_state="ready"}')["value"] == "1"
        before = float(query("sum(mjolnir_t5_steps_total)")["value"])
        assert "Paris" in board.chat()
        until("the new steps", lambda: float(query("sum(mjolnir_t5_steps_total)")["value"]) > before, 60)
        assert float(query("sum(vllm:generation_tokens_total)")["value"]) > 0
        assert query("count(ALERTS)")["value"] == "none", "an alert is on while all is well"


@contextmanager
def prometheus(folder: Path, board: Board) -> Iterator[Any]:
    """A real Prometheus over our configuration and rules, looking every second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed; scripts/services installs it")
    shutil.copytree(ROOT / "docker" / "prometheus", folder / "config")
    config = folder / "config" / "prometheus.yml"
    text = config.read_text()
    assert text.count("appliance:8000") == text.count("scrape_interval: 10s") == text.count("scrape_timeout: 8s") == 1
    text = text.replace("appliance:8000", board.url.removeprefix("http://"))
    config.write_text(text.replace("scrape_interval: 10s", "scrape_interval: 1s").replace("timeout: 8s", "timeout: 1s"))
    server = Board(f"http://127.0.0.1:{free_port()}")
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={server.url.removeprefix('http://')}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:

        def query(expression: str) -> dict[str, str]:
            answer = json.loads(server.get("/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
            rows = answer["data"]["result"]
            return {"value": rows[0]["value"][1] if rows else "none"}

        def answers() -> bool:
            try:
                return "Ready" in server.get("/-/ready")
            except OSError:
                return False

        until("Prometheus", answers, 60, lambda: "" if process.poll() is None else (folder / "log").read_text())
        yield query
    finally:
        process.terminate()
        process.wait(30)


def test_a_killed_engine_returns_by_itself(client: Any, composed: tuple[Compose, Board]) -> None:
    _, board = composed
    steps = board.total("mjolnir_t5_steps_total")
    killed = container(client).exec_run(["python3", "-c", KILL_CORE]).output.split()
    assert len(killed) == 1
    until("the loss", lambda: not board.is_ready(), 60)
    until("ready again", board.is_ready, fail=lambda: ended(client))
    assert board.total("appliance_engine_restarts_total") == 1
    assert board.total("mjolnir_t5_steps_total") >= steps
    assert "Paris" in board.chat()


def test_a_restarted_container_keeps_its_cache(client: Any, composed: tuple[Compose, Board]) -> None:
    compose, board = composed
    container(client).exec_run(["touch", "/cache/kept"])
    compose("--profile", "cpu", "restart", "--timeout", "60")
    until("ready", board.is_ready, fail=lambda: ended(client))
    assert "Paris" in board.chat()
    assert container(client).exec_run(["ls", "/cache/kept"]).exit_code == 0
    assert container(client).attrs["State"]["Health"]["Status"] in ("healthy", "starting")
    compose("--profile", "cpu", "stop", "--timeout", "60")
    assert container(client).attrs["State"]["ExitCode"] == 0


class Host:
    """`mjolnir` as it is typed on the board."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        lines = f"MJOLNIR_PORT={port}\nMODELS_DIR=./models\nCACHE_DIR=./cache\nSHM_SIZE=1gb\n"
        (folder / ".env").write_text(lines + "MJOLNIR_ALLOW_ANONYMOUS=true\nMJOLNIR_RESTART_LIMIT=1\n")
        for name in ("models", "cache"):
            (folder / name).mkdir()
            os.chown(folder / name, 1000, 1000)

    def __call__(self, command: str, *words: str) -> tuple[int, str, str]:
        options = [] if command == "image" else ["--name", NAME]
        if command not in ("image", "logs"):
            options += ["--env-file", str(self._folder / ".env"), "--state-dir", str(self._folder / "state"), "--json"]
        if command not in ("image", "logs", "down"):
            options += ["--deadline", "300"]
        done = subprocess.run(
            [sys.executable, "-m", "appliance.cli", command, *words, *options],
            capture_output=True, text=True, timeout=900, check=False, cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr


def derived(client: Any, base: str, tag: str, line: str) -> str:
    """An image of one line more."""
    name = f"{NAME}:{tag}"
    client.images.build(fileobj=io.BytesIO(f"FROM {base}\n{line}\n".encode()), tag=name, rm=True)
    return name


def test_upgrade_to_a_second_tag_and_back_from_a_broken_third(client: Any, cpu_image: str, tmp_path: Path) -> None:
    port = free_port()
    host, board = Host(tmp_path, port), Board(f"http://127.0.0.1:{port}")
    second = derived(client, cpu_image, "2", "LABEL tried=second")
    broken = derived(client, cpu_image, "3", "ENV MJOLNIR_MODEL=/opt/mjolnir/models/none")
    spoiled = derived(client, cpu_image, "4", f"USER 0\nRUN {SPOIL}\nUSER 1000")
    try:
        code, _, err = host("up", "--image", cpu_image)
        assert code == 0, err
        until("ready", board.is_ready)
        assert "Paris" in board.chat()
        # As to a board without a network.
        archive, expected = tmp_path / "second.tar", client.images.get(second).id
        assert host("image", "save", second, str(archive))[0] == 0
        client.images.remove(second)
        code, out, err = host("upgrade", "--load", str(archive))
        archive.unlink()
        assert code == 0, err
        assert json.loads(out)["done"] == "upgrade"
        assert running(client) == client.images.get(second).id == expected
        assert "Paris" in board.chat()
        code, _, err = host("upgrade", broken)
        assert code == 1, err
        assert "did not take over" in err
        assert running(client) == client.images.get(second).id
        assert "Paris" in board.chat()
        code, _, err = host("upgrade", spoiled)
        assert code == 1
        assert "registry.py: not patched: expected blob" in err
        assert err.endswith("nothing was changed\n")
        code, out, _ = host("logs", "--tail", "5")
        assert code == 0
        assert out.strip()
        code, _, err = host("rollback")
        assert code == 0, err
        assert running(client) == client.images.get(cpu_image).id
        assert "Paris" in board.chat()
        assert host("down")[0] == 0
        assert client.containers.get(NAME).attrs["State"]["ExitCode"] == 0
    finally:
        for one in client.containers.list(all=True, filters={"name": NAME}):
            one.remove(force=True)
        for image in (second, broken, spoiled):
            client.images.remove(image, force=True)


def running(client: Any) -> str:
    one = client.containers.get(NAME)
    assert one.status == "running"
    return str(one.image.id)
