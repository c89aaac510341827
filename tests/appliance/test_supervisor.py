"""The supervisor in this process, with the fake engine as its child."""

import asyncio
import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from appliance import processes
from appliance.command import Launch
from appliance.engine import Engine
from appliance.errors import ApplianceError, EngineError
from appliance.lifecycle import State
from appliance.log import Redactor
from appliance.policy import pause_before_start
from tests.appliance.conftest import Running

STARTED = [State.PREFLIGHT, State.STARTING, State.READY]
RESTARTED = [State.FAILED, State.BACKOFF, *STARTED]


async def last_fault(running: Running) -> dict:
    return json.loads(await running.get("/status"))["last_fault"]


async def test_start_serve_stop(appliance):
    async with appliance() as running:
        await running.states.reach(State.READY)
        assert running.processes() != []
        assert running.supervisor.socket.parent.stat().st_mode & 0o777 == 0o700
        running.supervisor.stop()
        await running.task
        assert running.states.seen == [*STARTED, State.DRAINING, State.STOPPED]
        assert running.processes() == []
        assert not running.supervisor.socket.parent.exists()
        assert not running.supervisor.stats_dir.exists()


@pytest.mark.parametrize(("code", "words"), [(0, "exit code 0"), (3, "exit code 3")])
async def test_any_exit_of_a_ready_engine_is_a_crash(appliance, code, words):
    """vLLM's API server ends with code 0 when its engine core was killed."""
    async with appliance() as running:
        await running.states.reach(State.READY)
        await running.post("/detokenize", {"code": code})
        await running.states.reach(State.READY, times=2)
        assert running.states.seen == [*STARTED, *RESTARTED]
        fault = await last_fault(running)
        assert (fault["cause"], fault["stage"], fault["text"]) == ("unknown", "ready", f"the engine ended ({words})")
        assert (await running.samples())['appliance_engine_restarts_total{cause="unknown"}'] == 1
        assert (await running.post("/v1/completions", {}))[0] == 200


async def test_a_killed_engine_is_started_again_and_counters_never_go_back(appliance):
    async with appliance() as running:
        seen = []
        for death in range(1, 4):
            await running.states.reach(State.READY, times=death)
            for _ in range(death):
                await running.post("/v1/completions", {})
            seen.append(await running.samples())
            os.kill(json.loads(await running.get("/version"))["pid"], signal.SIGKILL)
            await running.states.reach(State.BACKOFF, times=death)
            seen.append(await running.samples())
        assert "killed by SIGKILL" in (await last_fault(running))["text"]
        steps = [samples['mjolnir_t5_steps_total{kind="decode"}'] for samples in seen]
        assert steps == [1, 1, 3, 3, 6, 6]
        assert [samples["mjolnir_fallback_tokens_total"] for samples in seen] == [5, 5, 15, 15, 30, 30]
        assert seen[-1]['mjolnir_kernels_total{source="compiled"}'] == 9
        counters = [name for name in seen[0] if name.partition("{")[0].endswith("_total")]
        for before, after in pairwise(seen):
            assert all(after[name] >= before[name] for name in counters)


async def test_a_first_start_that_fails_by_its_settings_is_the_last(appliance):
    async with appliance("--fail-start", "ValueError: max_model_len is too large") as running:
        with pytest.raises(EngineError, match=r"\(exit code 1\): ValueError: max_model_len is too large") as caught:
            await running.task
        assert caught.value.exit_code == 1
        assert running.states.seen == [State.PREFLIGHT, State.STARTING, State.FAILED, State.STOPPED]


async def test_failed_starts_back_off_up_to_a_limit(appliance):
    error = "RuntimeError: NCCL error: unhandled system error"
    async with appliance("--fail-start", error, restart_limit=3) as running:
        with pytest.raises(EngineError, match=f"gave up after 3 failed starts; the last one: .*{error}"):
            await running.task
        assert running.states.seen.count(State.STARTING) == 3
        assert running.states.seen[-2:] == [State.FAILED, State.STOPPED]


@pytest.mark.parametrize(("failed", "pause"), [(0, 2), (1, 2), (2, 4), (3, 8), (4, 9), (5, 9), (10_000, 9)])
def test_the_pause_doubles_up_to_its_cap(failed, pause):
    assert pause_before_start(2.0, 9.0, failed) == pause


async def test_a_start_that_fails_once_is_made_again(appliance, tmp_path):
    once = tmp_path / "once"
    once.touch()
    async with appliance("--fail-start", "RuntimeError: NCCL", "--fail-once", str(once)) as running:
        await running.states.reach(State.READY)
        assert running.states.seen == [State.PREFLIGHT, State.STARTING, *RESTARTED]
        samples = await running.samples()
        assert samples['appliance_engine_restarts_total{cause="unknown"}'] == 1
        assert json.loads(await running.get("/status"))["failed_starts"] == 0


@pytest.mark.parametrize("flags", [(), ("--repeat-line", "No block found in 60 seconds")])
async def test_a_start_that_stands_still_is_ended(appliance, flags):
    async with appliance("--never-ready", *flags, start_timeout_seconds=1.0, restart_limit=1) as running:
        with pytest.raises(EngineError, match="nothing new from the engine for 1 s, in phase warm_up"):
            await running.task
        assert running.processes() == []


async def test_model_files_that_vanish_between_two_starts(appliance, model):
    async with appliance(restart_limit=2) as running:
        await running.states.reach(State.READY)
        (model / "config.json").unlink()
        await running.post("/detokenize", {"code": 1})
        with pytest.raises(ApplianceError, match=r"gave up after 2 failed starts; the last one: .*no config\.json"):
            await running.task


async def test_a_stop_lets_streams_finish_and_nothing_in(appliance):
    async with appliance() as running:
        await running.states.reach(State.READY)
        chunks = [f"data: {number}\n\n" for number in range(20)]
        async with running.http.post("/v1/completions", json={"script": {"chunks": chunks, "gap": 0.05}}) as response:
            first = await response.content.readany()
            running.supervisor.stop()
            await running.states.reach(State.DRAINING)
            status, body = await running.post("/v1/completions", {})
            assert (status, json.loads(body)["error"]["code"]) == (503, "engine_not_ready")
            assert "draining" in json.loads(body)["error"]["message"]
            assert first + await response.read() == "".join(chunks).encode()
        await running.task


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_stream_that_outlasts_the_drain_gets_an_error_event(appliance, signals):
    """One signal waits for ``drain_seconds``; the second one does not."""
    async with appliance(drain_seconds=0.3 if signals == 1 else 600) as running:
        await running.states.reach(State.READY)
        script = {"chunks": ["data: 1\n\n"], "hang": True}
        async with running.http.post("/v1/completions", json={"script": script}) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            for _ in range(signals):
                running.supervisor.stop()
            rest = await response.read()
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "engine_lost"
        await running.task


@pytest.mark.parametrize("state", [State.PREFLIGHT, State.STARTING, State.BACKOFF])
async def test_a_stop_in_any_state(appliance, monkeypatch, state):
    async def endless(*_):
        await asyncio.Event().wait()

    if state is State.PREFLIGHT:
        monkeypatch.setattr("appliance.preflight.check_flags", endless)
    flags = ("--fail-start", "RuntimeError: x") if state is State.BACKOFF else ("--never-ready",)
    async with appliance(*flags, backoff_seconds=600, backoff_cap_seconds=600) as running:
        await running.states.reach(state)
        running.supervisor.stop()
        await asyncio.wait_for(running.task, 20)
        assert running.states.seen[-3:] == [state, State.DRAINING, State.STOPPED]


@pytest.mark.parametrize("flags", [("--setsid-child",), ("--ignore-sigterm", "-1")])
async def test_nothing_of_the_engine_survives_a_stop(appliance, flags):
    """A child in a session of its own, deaf to SIGTERM; an engine that is deaf itself."""
    async with appliance(*flags, stop_seconds=0.5) as running:
        await running.states.reach(State.READY)
        if "--setsid-child" in flags:
            child = (await running.events.wait("child"))["pid"]
            assert child in running.processes()
        running.supervisor.stop()
        await running.task
        assert running.processes() == []


async def test_a_lost_sigterm_is_repeated(appliance):
    """vLLM loses a SIGTERM that arrives while it brings up its HTTP server: a stop took all of its 20 seconds."""
    async with appliance("--ignore-sigterm", "1", stop_seconds=600.0) as running:
        await running.states.reach(State.READY)
        running.supervisor.stop()
        await running.events.wait("sigterm")
        await running.events.wait("sigterm")
        await asyncio.wait_for(running.task, 20)


async def test_a_killed_engine_leaves_no_shared_memory(tmp_path):
    """Killing Python's resource tracker with the rest left 400 MB of vLLM's message queues in /dev/shm."""
    code = (
        "import signal, time; from multiprocessing.shared_memory import SharedMemory;"
        "signal.signal(15, signal.SIG_IGN); s = SharedMemory(create=True, size=4096); print(s.name, flush=True);"
        "time.sleep(600)"
    )
    named: asyncio.Queue[str] = asyncio.Queue()
    launch = Launch((sys.executable, "-c", code), dict(os.environ), tmp_path / "socket")
    engine = Engine(launch, 600.0, named.put_nowait)
    await engine.start()
    segment = Path("/dev/shm") / await asyncio.wait_for(named.get(), 20)
    assert segment.exists()
    engine.kill()
    assert await engine.wait() == 128 + signal.SIGKILL
    assert not segment.exists()


async def test_nothing_of_a_crashed_engine_runs_beside_the_next_one(appliance):
    async with appliance("--setsid-child") as running:
        await running.states.reach(State.READY)
        first = (await running.events.wait("child"))["pid"]
        await running.post("/detokenize", {"code": 0})
        await running.states.reach(State.FAILED)
        assert first not in running.processes()
        await running.states.reach(State.READY, times=2)


async def test_a_killed_keeper_leaves_nothing_behind(appliance):
    processes.become_subreaper()
    async with appliance("--setsid-child") as running:
        await running.states.reach(State.READY)
        old = set(running.processes())
        os.kill(running.supervisor.engine_pid, signal.SIGKILL)
        await running.states.reach(State.FAILED)
        assert not old & set(running.processes())
        await running.states.reach(State.READY, times=2)


async def test_a_flood_in_the_log_does_not_hold_up_the_engine(appliance):
    """One line of 30 MB: more than any pipe holds, so the engine would stand still if nobody read."""
    async with appliance("--flood", str(30 << 20)) as running:
        await running.states.reach(State.READY)
        tail = json.loads(await running.get("/status"))["log_tail"]
        assert max(map(len, tail)) <= 8192


async def test_secrets_are_masked_before_anybody_sees_a_line(tmp_path):
    lines = []
    launch = Launch(("echo", "api_key=hush-hush"), dict(os.environ), tmp_path / "socket")
    engine = Engine(launch, 5.0, lines.append, Redactor(["hush-hush"]))
    await engine.start()
    assert await engine.wait() == 0
    assert lines == engine.tail() == ["api_key=***"]


async def test_a_program_that_does_not_exist(tmp_path):
    lines = []
    engine = Engine(Launch(("/nowhere",), dict(os.environ), tmp_path / "s"), 5.0, lines.append)
    await engine.start()
    assert await engine.wait() == 127
    assert lines == ["/nowhere: No such file or directory"]
