"""Faults that are put in, and what the supervisor makes of them: the fake engine behind the whole appliance.

After each: the service is back by what its policy says, nothing of the lost engine is left, no counter has gone back.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from appliance.errors import EngineError
from appliance.lifecycle import State
from appliance.processes import title
from tests.appliance.conftest import FAKE, Running

RESTARTS = 'appliance_engine_restarts_total{{cause="{}"}}'


async def status(running: Running) -> dict:
    return json.loads(await running.get("/status"))


@contextlib.asynccontextmanager
async def recovers(running: Running, cause: str) -> AsyncIterator[set[int]]:
    """Within: do the harm. After: one restart of that class, none of the old processes, counters as high."""
    await running.states.reach(State.READY)
    await running.post("/v1/completions", {})
    before, old = await running.samples(), set(running.processes())
    yield old
    await running.states.reach(State.READY, times=2)
    assert not old & set(running.processes())
    after = await running.samples()
    assert after[RESTARTS.format(cause)] == 1
    assert after['mjolnir_t5_steps_total{kind="decode"}'] >= before['mjolnir_t5_steps_total{kind="decode"}'] >= 1
    assert all(after[n] >= before[n] for n in before if n.partition("{")[0].endswith("_total") and "vllm" not in n)
    assert (await running.post("/v1/completions", {}))[0] == 200
    assert (await status(running))["last_fault"]["cause"] == cause


async def test_a_killed_engine_core_is_noticed_before_the_api_server_does(appliance):
    """vLLM's API server lives on for seconds and answers /health; this one for ever."""
    async with appliance("--core") as running:
        async with recovers(running, "unknown"):
            core = (await running.events.wait("core"))["pid"]
            assert title(core).startswith("VLLM::EngineCore")
            os.kill(core, signal.SIGKILL)
            await running.states.reach(State.FAILED)
        assert (await status(running))["last_fault"]["text"] == "the engine's process VLLM::EngineCore ended"


async def test_a_killed_api_server(appliance):
    async with appliance("--core") as running:
        async with recovers(running, "unknown"):
            os.kill(json.loads(await running.get("/version"))["pid"], signal.SIGKILL)
        assert "killed by SIGKILL" in (await status(running))["last_fault"]["text"]


async def test_a_stopped_engine_is_a_hang_and_its_group_is_killed(appliance):
    """SIGSTOP while a request runs: the process answers nothing, not even SIGTERM."""
    async with appliance("--core", hang_seconds=0.6) as running, recovers(running, "hang") as old:
        request = asyncio.create_task(running.post("/v1/completions", {"script": {"hang": True}}))
        await running.events.wait("request")
        for pid in old - {running.supervisor.engine_pid}:
            os.kill(pid, signal.SIGSTOP)
        await running.states.reach(State.FAILED)
        await asyncio.wait_for(request, 20)
        samples = await running.samples()
        assert samples["appliance_watchdog_strikes_total"] == 3
        assert "its metrics do not answer" in (await status(running))["last_fault"]["text"]


async def test_an_engine_that_runs_requests_and_no_steps_hangs(appliance):
    async with appliance(hang_seconds=0.6) as running, recovers(running, "hang"):
        async with running.http.post(
            "/v1/completions", json={"script": {"chunks": ["data: 1\n\n"], "hang": True}}
        ) as r:
            rest = await r.read()
        assert b"engine_lost" in rest  # the stream ends with an error event
        await running.states.reach(State.BACKOFF)
        assert "1 requests and no step" in (await status(running))["last_fault"]["text"]


async def test_a_client_that_does_not_read_is_no_hang_of_the_engine(appliance):
    """The engine knows of no request and answers a probe: the client is to blame."""
    async with appliance(hang_seconds=0.6) as running:
        await running.states.reach(State.READY)
        script = {"chunks": ["data: 1\n\n"], "hang": True, "unseen": True}
        async with running.http.post("/v1/completions", json={"script": script}) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            for _ in range(4):  # looks
                await running.events.wait("probe")
        assert running.states.seen[-1] is State.READY
        assert (await running.samples())["appliance_watchdog_strikes_total"] == 0


async def test_a_slow_stream_is_no_hang(appliance):
    """Each chunk is a step; there are more looks than strikes that a hang takes."""
    async with appliance(hang_seconds=0.9) as running:
        await running.states.reach(State.READY)
        for _ in range(5):
            script = {"chunks": ["data: 1\n\n"], "gap": 0.25}
            assert (await running.post("/v1/completions", {"script": script}))[0] == 200
        assert running.states.seen[-1] is State.READY


class Heard(logging.Handler):
    """Waits for messages of a logger."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__()
        self._words = words
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self._logger = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.said.put_nowait(record.getMessage())

    def __enter__(self) -> "Heard":
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(logging.NOTSET)


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A program of a compiler's name that is busy for ever."""
    program = tmp_path / "ptxas"
    program.symlink_to("/bin/sleep")
    return str(program)


async def test_a_start_that_compiles_in_silence_does_not_stand_still(appliance, compiler):
    flags = ("--never-ready", "--compiler", compiler)
    with Heard("appliance.startup", "silent while it compiles: ptxas") as heard:
        async with appliance(*flags, start_timeout_seconds=2.5, restart_limit=1) as running:
            pid = (await running.events.wait("compiler"))["pid"]
            await asyncio.wait_for(heard.said.get(), 20)
            assert running.states.seen[-1] is State.STARTING
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="the start stands still"):
                await running.task


async def test_a_ready_engine_that_compiles_does_not_hang(appliance, compiler):
    with Heard("appliance.watchdog", "no progress while the engine compiles: ptxas") as heard:
        async with appliance("--compiler", compiler, hang_seconds=0.3) as running, recovers(running, "hang"):
            pid = (await running.events.wait("compiler"))["pid"]
            request = asyncio.create_task(running.post("/v1/completions", {"script": {"hang": True}}))
            for _ in range(5):
                await asyncio.wait_for(heard.said.get(), 20)
            assert running.states.seen[-1] is State.READY
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(request, 20)


async def test_an_engine_that_ends_with_code_0_again_and_again(appliance):
    async with appliance(crash_limit=3) as running:
        for life in range(1, 4):
            await running.states.reach(State.READY, times=life)
            await running.post("/detokenize", {"code": 0})
        told = r"gave up after 3 crashes within 1800 s of serving; the last one: the engine ended \(exit code 0\)"
        with pytest.raises(EngineError, match=told):
            await running.task
        assert running.states.seen.count(State.READY) == 3
        assert running.states.seen[-2:] == [State.FAILED, State.STOPPED]
        assert running.processes() == []


async def test_a_long_life_clears_the_record_of_crashes(appliance):
    """The window is shorter than each life, so that no limit is reached."""
    async with appliance(crash_limit=2, crash_window_seconds=1e-6) as running:
        for life in range(1, 4):
            await running.states.reach(State.READY, times=life)
            await running.post("/detokenize", {"code": 0})
        await running.states.reach(State.READY, times=4)


async def test_an_engine_that_refuses_sigterm_when_it_fails_to_start(appliance):
    flags = ("--ignore-sigterm", "-1", "--never-ready", "--setsid-child")
    async with appliance(*flags, start_timeout_seconds=0.5, restart_limit=2) as running:
        with pytest.raises(EngineError, match="gave up after 4 failed starts; the last one: the start stands still"):
            await running.task
        assert running.processes() == []


async def test_a_flood_of_the_log_while_serving(appliance):
    async with appliance("--repeat-line", "x" * 4000) as running:
        await running.states.reach(State.READY)
        for _ in range(20):
            assert (await running.post("/tokenize", {}))[0] == 200
        assert running.states.seen[-1] is State.READY


# --- other classes ---------------------------------------------------------------------------------------------------


async def test_a_poisoned_cache_is_put_aside_after_the_second_like_failure(appliance, tmp_path):
    cache = tmp_path / "cache" / "inductor"
    cache.mkdir(parents=True)
    (cache / "broken.so").write_text("x")
    error = "ImportError: /cache/inductor/broken.so: file too short"
    flags = ("--fail-start", error, "--healed-without", str(cache / "broken.so"))
    async with appliance(*flags) as running:
        await running.states.reach(State.READY)
        assert running.states.seen.count(State.STARTING) == 3
        assert not cache.exists()
        assert (tmp_path / "cache" / "inductor.old" / "broken.so").read_text() == "x"
        samples = await running.samples()
        assert samples["appliance_cache_rotations_total"] == 1
        assert samples[RESTARTS.format("poisoned_cache")] == 2


async def test_a_bad_flag_and_a_bad_model_stop_at_once(appliance):
    for error in ("ValueError: max_num_seqs must be positive", "SafetensorError: header too large"):
        async with appliance("--fail-start", error) as running:
            with pytest.raises(EngineError, match=error):
                await running.task
            assert running.states.seen.count(State.STARTING) == 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "out_of_memory"),
        (
            "AssertionError: Error in memory profiling. Initial free memory 1 GiB, current free memory 2",
            "profiling_race",
        ),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
    ],
)
async def test_what_may_pass_is_tried_again(appliance, tmp_path, error, cause):
    once = tmp_path / "once"
    once.touch()
    async with appliance("--fail-start", error, "--fail-once", str(once)) as running:
        await running.states.reach(State.READY)
        assert (await running.samples())[RESTARTS.format(cause)] == 1
        assert (await status(running))["rung"] == "full"


# --- memory, disk, neighbours ----------------------------------------------------------------------------------------


def meminfo(root: Path, available_gib: float) -> None:
    (root / "proc").mkdir(exist_ok=True, parents=True)
    new = root / "proc" / "meminfo.new"
    new.write_text(
        f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {int(available_gib * 2**20)} kB\nCached: 1 kB\n"
    )
    new.replace(root / "proc" / "meminfo")


async def test_a_start_below_the_memory_floor_is_ended(appliance, tmp_path):
    root = tmp_path / "root"
    meminfo(root, 4)
    async with appliance("--never-ready", memory_floor_gib=1.0, restart_limit=2, settle_seconds=0) as running:
        running.supervisor._root = str(root)
        await running.states.reach(State.STARTING)
        await running.events.wait("serving")
        meminfo(root, 0.5)
        await running.states.reach(State.BACKOFF)
        fault = (await status(running))["last_fault"]
        assert (fault["cause"], "fell to 0.50 GiB in phase warm_up" in fault["text"]) == ("out_of_memory", True)
        with pytest.raises(EngineError, match=r"last one: not enough memory: .* are needed and 0.5 GiB available"):
            await running.task
        assert running.states.seen.count(State.STARTING) == 1  # the second is refused before it costs anything
        assert running.processes() == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, full by a file named filler."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a disk of its own takes root and the right to mount")
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    yield folder
    subprocess.run(["/bin/umount", "-l", str(folder)], check=True)


async def test_a_full_disk_under_the_counters(appliance, full_disk):
    """The engine can't make its counters file: counts are missing, answers are not."""
    async with appliance(stats_dir=full_disk) as running:
        await running.states.reach(State.READY)
        assert (await running.post("/v1/completions", {}))[0] == 200
        assert (await running.samples())['mjolnir_t5_steps_total{kind="decode"}'] == 0
        (full_disk / "filler").unlink()
        await running.post("/detokenize", {"code": 0})
        await running.states.reach(State.READY, times=2)
        await running.post("/v1/completions", {})
        assert (await running.samples())['mjolnir_t5_steps_total{kind="decode"}'] == 1


def serve_command(model: Path, folder: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    command = [
        sys.executable,
        "-m",
        "appliance.cli",
        "serve",
        "--model",
        str(model),
        "--stats-dir",
        str(folder / "stats"),
    ]
    environment = {"MJOLNIR_ENGINE_COMMAND": f"{sys.executable} {FAKE}", "MJOLNIR_CACHE_DIR": str(folder / "cache")}
    return [*command, *options], {**os.environ, **environment}


async def test_two_starts_at_once_in_one_folder(appliance, model, tmp_path):
    async with appliance() as running:
        await running.states.reach(State.READY)
        before = set(running.processes())
        command, environment = serve_command(model, tmp_path, "--port", "0")
        second = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
        _, told = await second.communicate()
        assert second.returncode == 2
        last = told.decode().splitlines()[-1]
        assert f"in use by the appliance with process id {os.getpid()}; accepted" in last
        assert before <= set(running.processes())
        assert (await running.post("/v1/completions", {}))[0] == 200


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen]]:
    """Processes with an engine core's title, deaf to SIGTERM, by the counters folder in their environment."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    (tmp_path / "stats" / "99999").mkdir(parents=True)
    started = {}
    for name in ("stats/99999", "stats", "99999"):
        started[name] = subprocess.Popen(
            ["VLLM::EngineCore", "-c", code],  # noqa: S607  (a title, the program is named below)
            executable=sys.executable,
            env={**os.environ, "MJOLNIR_STATS_DIR": str(tmp_path / name)},
            stdout=subprocess.PIPE,
        )
        started[name].stdout.readline()
    yield started
    for child in started.values():
        child.kill()
        child.communicate()


async def test_what_a_dead_supervisor_left_is_ended_before_a_start(appliance, left_behind):
    """And nobody else's: neither by the folder above it, nor by another folder of that name."""
    async with appliance() as running:
        await running.states.reach(State.READY)
        ended = {name: child.poll() is not None for name, child in left_behind.items()}
        assert ended == {"stats/99999": True, "stats": False, "99999": False}
        assert (await running.samples())["appliance_orphans_ended_total"] == 1
        assert any("VLLM::EngineCore" in event["text"] for event in (await status(running))["events"])


def test_a_squatted_port_costs_one_line(model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        command, environment = serve_command(model, tmp_path, "--port", str(port))
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"port={port}: Address already in use on 127.0.0.1; accepted: a free port" in done.stderr.splitlines()[-1]
