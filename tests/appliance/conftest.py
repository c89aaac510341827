import asyncio
import contextlib
import io
import json
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from appliance import caches
from appliance.lifecycle import State
from appliance.processes import has_variable
from appliance.serve import Stack, listen
from appliance.settings import Settings
from appliance.watcher import Watcher

FAKE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No MJOLNIR_ variable, compile cache or .env of the developer's reaches a test."""
    for name in [name for name in os.environ if name.startswith("MJOLNIR_")]:
        monkeypatch.delenv(name)
    for name in caches.VARIABLES:  # the engine's caches are put aside by some tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def write_safetensors(path: Path, data: bytes = b"\0" * 8) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder that passes preflight; nothing loads it."""
    folder = tmp_path / "fake-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder


class Events:
    """What the fake engine tells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    async def wait(self, event: str, seconds: float = 20.0) -> dict:
        """The next event of a name; others before it are dropped."""
        async with asyncio.timeout(seconds):
            while True:
                told = json.loads(await asyncio.get_running_loop().sock_recv(self._socket, 65536))
                if told["event"] == event:
                    return told

    def close(self) -> None:
        self._socket.close()


class States(Watcher):
    """The supervisor's states in order, to be waited for."""

    def __init__(self) -> None:
        self.seen: list[State] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task] = set()

    def state_changed(self, state: State) -> None:
        self.seen.append(state)
        task = asyncio.ensure_future(self._wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reach(self, state: State, times: int = 1, seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: self.seen.count(state) >= times)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Running:
    """An appliance in this process with a fake engine."""

    def __init__(self, stack: Stack, states: States, events: Events, task: asyncio.Task) -> None:
        self.stack = stack
        self.supervisor = stack.supervisor
        self.url = stack.url
        self.states = states
        self.events = events
        self.task = task
        self.http = aiohttp.ClientSession(stack.url)

    async def get(self, path: str) -> str:
        async with self.http.get(path) as response:
            return await response.text()

    async def post(self, path: str, body: object) -> tuple[int, bytes]:
        data = io.BytesIO(json.dumps(body).encode())
        async with self.http.post(path, data=data) as response:
            return response.status, await response.read()

    async def samples(self) -> dict[str, float]:
        """Samples of /metrics by name and labels, as they are written there."""
        lines = [line for line in (await self.get("/metrics")).splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def processes(self) -> list[int]:
        """Every process that the engine's environment has reached."""
        mark = f"MJOLNIR_STATS_DIR={self.supervisor.stats_dir}"
        return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and has_variable(int(pid), mark)]


@pytest.fixture
def settings_for(model: Path, tmp_path: Path) -> Callable[..., Settings]:
    def build(*flags: str, **values: object) -> Settings:
        base = {
            "model": str(model),
            "port": 0,
            "cache_dir": tmp_path / "cache",
            "stats_dir": tmp_path / "stats",
            "engine_command": (sys.executable, str(FAKE)),
            "engine_args": flags,
            "backoff_seconds": 0.05,
            "settle_seconds": 0.0,
            "stop_seconds": 10.0,
            "drain_seconds": 10.0,
        }
        return Settings(**{**base, **values})

    return build


@pytest.fixture
async def appliance(
    settings_for: Callable[..., Settings], tmp_path: Path
) -> AsyncIterator[Callable[..., contextlib.AbstractAsyncContextManager[Running]]]:
    """``async with appliance(*fake flags, **settings) as running``: it has been started and not awaited."""
    events = Events(tmp_path / "events")

    @contextlib.asynccontextmanager
    async def start(*flags: str, **values: object) -> AsyncIterator[Running]:
        settings = settings_for("--events", str(events.path), *flags, **values)
        states = States()
        with listen(settings.host, settings.port) as listener:
            stack = Stack(settings, dict(os.environ), listener, [states])
            task = asyncio.create_task(stack.run())
            running = Running(stack, states, events, task)
            try:
                yield running
            finally:
                await running.http.close()
                stack.supervisor.stop()
                stack.supervisor.stop()
                await asyncio.gather(task, return_exceptions=True)
            assert running.processes() == []

    yield start
    events.close()
