"""compose.fleet.yaml for real: nginx and vllm-router in front of two appliances, one of them killed under load."""

import io
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docker.boards import MODEL, ROOT, Board, Compose, free_port, until
from tests.docker.conftest import BASE

pytestmark = [
    pytest.mark.docker,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

NAME = f"mjolnir-fleet-{os.getpid()}"
ROUTER = "vllm-router==0.1.17"
PYTHON, NGINX, ROUTER_IMAGE = "mjolnir-test:python", "mjolnir-test:nginx", "mjolnir-test:router"
CLIENTS = 8
TOKENS = 48


@pytest.fixture(scope="module")
def images(client: Any, cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The router's image from its own Dockerfile, and an nginx, on the base of the cpu image: there is no registry."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed; scripts/services installs it")
    folder = tmp_path_factory.mktemp("wheels")
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(folder),
        "--only-binary=:all:",
        ROUTER,
    ]
    subprocess.run(download, check=True)
    wheels = {f"wheels/{path.name}": path for path in folder.iterdir()}
    # pip in /usr/local, as in the Dockerfile's own base.
    python = f"FROM {BASE}\nCOPY wheels /wheels\nRUN python3 -m venv /usr/local\n"
    python += "ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels\n"
    build(client, PYTHON, python, wheels)
    build(client, NGINX, f"FROM {BASE}\nCOPY nginx /usr/local/bin/nginx\nRUN nginx -v\n", {"nginx": Path(nginx)})
    client.images.build(
        path=str(ROOT / "docker" / "router"), buildargs={"BASE_IMAGE": PYTHON}, tag=ROUTER_IMAGE, rm=True
    )
    return {"ROUTER_IMAGE": ROUTER_IMAGE, "NGINX_IMAGE": NGINX, "appliance": cpu_image}


def build(client: Any, tag: str, dockerfile: str, files: dict[str, Path]) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(dockerfile)
        archive.addfile(entry, io.BytesIO(dockerfile.encode()))
        for name, path in files.items():
            archive.add(path, name)
    stream.seek(0)
    client.images.build(fileobj=stream, custom_context=True, tag=tag, rm=True)


@pytest.fixture(scope="module")
def boards(client: Any, images: dict[str, str]) -> Iterator[list[tuple[Any, Board]]]:
    """Two appliances, published on the address that the router's network reaches this machine by."""
    subnet = client.networks.get("bridge").attrs["IPAM"]["Config"][0]["Subnet"]
    gateway = str(next(ipaddress.ip_network(subnet).hosts()))
    made = []
    try:
        for number in (1, 2):
            port = free_port(gateway)
            container = client.containers.run(
                images["appliance"],
                name=f"{NAME}-board-{number}",
                detach=True,
                init=True,
                read_only=True,
                tmpfs={"/tmp": "exec,mode=1777"},
                shm_size="1g",
                ports={"8000/tcp": (gateway, port)},
                environment={"MJOLNIR_ALLOW_ANONYMOUS": "true"},
            )
            made.append((container, Board(f"http://{gateway}:{port}")))
        for container, board in made:
            until("a board", board.is_ready, 600, lambda container=container: why_ended(container))
        yield made
    finally:
        for container, _ in made:
            container.remove(force=True, v=True)


def why_ended(container: Any) -> str:
    container.reload()
    return "" if container.status in ("running", "created") else container.logs(tail=5).decode()


@pytest.fixture(scope="module")
def front(
    client: Any, images: dict[str, str], boards: list[tuple[Any, Board]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Board]:
    folder = tmp_path_factory.mktemp("fleet")
    targets = [board.url.removeprefix("http://") for _, board in boards]
    (folder / "fleet").mkdir()
    (folder / "fleet" / "appliances.json").write_text(json.dumps([{"targets": targets}]))
    # Where the compose file's own folder would be.
    (folder / "docker").mkdir()
    (folder / "docker" / "router").symlink_to(ROOT / "docker" / "router")
    port = free_port()
    variables = {name: value for name, value in images.items() if name.isupper()}
    variables |= {"FLEET_DIR": str(folder / "fleet"), "FLEET_PORT": str(port), "ROUTER_POLICY": "power_of_two"}
    compose = Compose(folder, NAME, "compose.fleet.yaml", variables)
    try:
        compose("up", "--detach", "--no-build", "front", "router")
        board = Board(f"http://127.0.0.1:{port}")
        until("the router", board.is_ready, 120)
        yield board
    except AssertionError:
        sys.stderr.write(compose("logs", "--tail", "50"))
        raise
    finally:
        compose("down", "--volumes", "--timeout", "10")


@dataclass
class Request:
    """What became of one request."""

    begun: bool = False
    done: bool = False
    error: str = ""


def kill(container: Any) -> None:
    """SIGKILL for a container's first process, by ourselves: on a busy machine the daemon may take a minute for it."""
    container.reload()
    os.kill(container.attrs["State"]["Pid"], signal.SIGKILL)


def stream(front: Board, number: int, begun: threading.Event, sent: list[Request]) -> None:
    body = {"model": MODEL, "prompt": f"Chapter {number}:", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{front.url}/v1/completions", json.dumps(body).encode(), headers)
    one = Request()
    sent.append(one)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {") and b'"error"' not in line:
                    one.begun = True
                    begun.set()
                one.done = one.done or line.startswith(b"data: [DONE]")
    except (OSError, urllib.error.URLError, ValueError) as error:
        one.error = repr(error)


def test_only_the_routes_of_a_client_pass(front: Board) -> None:
    assert MODEL in front.get("/v1/models")
    assert "Paris" in front.chat()
    for path in ("/metrics", "/status", "/list_workers", "/add_worker", "/admin/restore", "/v1/../metrics"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            front.get(path)
        assert caught.value.code in (403, 404), path


def test_a_killed_board_loses_no_request_that_had_not_begun(front: Board, boards: list[tuple[Any, Board]]) -> None:
    """Streams that had begun on the killed board end; every other request is answered whole by the other one."""
    (lost, lost_board), (_, other) = boards
    before = [board.total("vllm:request_success_total") for _, board in boards]
    begun, dead, sent = threading.Event(), threading.Event(), list[Request]()
    after_the_kill: list[Request] = []

    def client(number: int) -> None:
        # As many turns as the daemon needs for its kill, so that it falls among streams, and two after it.
        turn = 0
        while not dead.is_set():
            stream(front, 100 * turn + number, begun, sent)
            turn += 1
        for later in range(turn, turn + 2):
            stream(front, 100 * later + number, begun, after_the_kill)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        assert begun.wait(120)
        kill(lost)
        until("the end of a board", lambda: not lost_board.is_ready(), 60)
    finally:
        dead.set()
    for thread in threads:
        thread.join()
    every = sent + after_the_kill
    broken = [one for one in every if not one.done]
    assert all(one.begun for one in broken), [one for one in broken if not one.begun]
    assert len(broken) <= CLIENTS
    assert len(after_the_kill) == 2 * CLIENTS
    assert all(one.done for one in after_the_kill), after_the_kill
    assert other.total("vllm:request_success_total") - before[1] >= len(after_the_kill)
    assert front.is_ready()
