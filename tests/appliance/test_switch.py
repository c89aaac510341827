"""Another engine on request: down the degrade ladder by itself, up it and to other settings on the operator's word."""

import asyncio
import json

import pytest

from appliance.errors import EngineError
from appliance.lifecycle import State
from appliance.processes import has_variable
from appliance.watcher import Watcher
from tests.appliance.conftest import Running


async def status(running: Running) -> dict:
    return json.loads(await running.get("/status"))


# --- the degrade ladder ----------------------------------------------------------------------------------------------


class Rungs(Watcher):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def degraded(self, rung) -> None:
        self.seen.append(str(rung))


CUDA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
NO_IMAGE = "RuntimeError: CUDA error: no kernel image is available for execution on the device"


async def test_a_cuda_error_takes_the_ladder_down_and_the_operator_takes_it_up(appliance):
    flags = ("--no-enforce-eager", "--fail-start", CUDA, "--healed-by", "eager")
    async with appliance(*flags, restart_limit=2) as running:
        rungs = Rungs()
        running.supervisor.tell(rungs)
        await running.states.reach(State.READY)
        assert rungs.seen == ["t5_off", "eager"]
        assert running.states.seen.count(State.STARTING) == 5  # two like failures a rung
        report = await status(running)
        assert (report["rung"], report["last_fault"]["cause"]) == ("eager", "cuda_error")
        assert any("degraded to eager after cuda_error" in event["text"] for event in report["events"])
        assert (await running.samples())['appliance_engine_rung{appliance_engine_rung="eager"}'] == 1
        async with running.http.post("/admin/restore", json={}) as response:
            assert response.status == 202
        await running.states.reach(State.SWITCHING)
        await running.states.reach(State.READY, times=2)
        assert rungs.seen == ["t5_off", "eager", "full", "t5_off", "eager"]
        assert (await status(running))["last_switch"]["done"] is False


async def test_a_restore_that_works(appliance, tmp_path):
    broken = tmp_path / "broken"
    broken.touch()
    async with appliance("--fail-start", NO_IMAGE, "--healed-without", str(broken), "--healed-by", "t5_off") as running:
        await running.states.reach(State.READY)
        assert (await status(running))["rung"] == "t5_off"
        assert has_variable(running.supervisor.engine_pid, "MJOLNIR_ATTN_DISABLE=1")
        broken.unlink()
        outcome = await running.supervisor.request_restore()
        assert (outcome.done, (await status(running))["rung"]) == (True, "full")
        with pytest.raises(EngineError, match="nothing to restore"):
            running.supervisor.request_restore()
        async with running.http.post("/admin/restore", json={}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (409, "restore_refused")


async def test_a_missing_kernel_image_below_the_ladder_is_the_last_word(appliance):
    """The fake engine is eager already and has one fallback: there is one rung."""
    async with appliance("--fail-start", NO_IMAGE) as running:
        with pytest.raises(EngineError, match=r"gave up after 2 failed starts; the last one: .*no kernel image"):
            await running.task
        assert running.states.seen.count(State.STARTING) == 2


async def test_a_failed_self_test_takes_one_rung(appliance):
    async with appliance("--fail-self-test", "--healed-by", "t5_off") as running:
        await running.states.reach(State.READY)
        report = await status(running)
        assert (report["rung"], report["last_fault"]["cause"]) == ("t5_off", "self_test")
        assert report["last_fault"]["text"].endswith("/v1/chat/completions answered 500: EngineCore failed: nan")
        assert running.states.seen.count(State.READY) == 1


async def test_a_self_test_without_an_answer_stands_still(appliance):
    async with appliance("--deaf", start_timeout_seconds=1.0, restart_limit=1) as running:
        with pytest.raises(EngineError, match="nothing new from the engine for 1 s, in phase self_test"):
            await running.task


async def test_without_the_self_test_a_deaf_engine_is_ready(appliance):
    async with appliance("--deaf", self_test=False) as running:
        await running.states.reach(State.READY)


# --- another engine --------------------------------------------------------------------------------------------------


async def test_a_switch_lets_streams_finish_and_starts_the_other_engine(appliance, settings_for):
    async with appliance(hold_seconds=30.0) as running:
        await running.states.reach(State.READY)
        first = running.supervisor.engine_pid
        chunks = [f"data: {number}\n\n" for number in range(10)]
        async with running.http.post("/v1/completions", json={"script": {"chunks": chunks, "gap": 0.05}}) as response:
            begun = await response.content.readany()
            events = ("--events", str(running.events.path))
            outcome = running.supervisor.request_switch("other", settings_for(*events, served_model_name="other"))
            await running.states.reach(State.SWITCHING)
            held = asyncio.create_task(running.post("/v1/completions", {}))
            assert begun + await response.read() == "".join(chunks).encode()
        told = await outcome
        assert (told.name, told.done, told.reason) == ("other", True, "")
        assert (await held)[0] == 200
        assert running.supervisor.engine_pid != first
        seen = running.states.seen
        assert seen[3:] == [State.SWITCHING, State.PREFLIGHT, State.STARTING, State.READY]
        report = await status(running)
        assert (report["model"], report["restarts"]) == ("other", 0)
        assert "switched to 'other'" in [event["text"] for event in report["events"]]


async def test_a_switch_that_fails_returns_by_itself(appliance, settings_for):
    async with appliance() as running:
        await running.states.reach(State.READY)
        broken = settings_for("--fail-start", "torch.OutOfMemoryError: CUDA out of memory.", served_model_name="big")
        told = await running.supervisor.request_switch("big", broken)
        assert (told.name, told.done) == ("big", False)
        assert told.reason.startswith("out_of_memory: the engine ended (exit code 1): OutOfMemoryError")
        await running.states.reach(State.READY, times=2)
        report = await status(running)
        assert (report["model"], report["last_switch"]["done"]) == ("fake-model", False)
        assert "out_of_memory" in report["last_switch"]["reason"]
        assert (await running.post("/v1/completions", {}))[0] == 200


async def test_a_switch_to_what_can_not_work_costs_the_present_engine_nothing(appliance, settings_for, tmp_path):
    async with appliance() as running:
        await running.states.reach(State.READY)
        told = await running.supervisor.request_switch("gone", settings_for(model=str(tmp_path / "gone")))
        assert (told.done, "no such model folder" in told.reason) == (False, True)
        assert running.states.seen[-1] is State.READY


async def test_one_change_at_a_time_and_none_at_the_end(appliance, settings_for):
    async with appliance() as running:
        await running.states.reach(State.READY)
        stuck = running.supervisor.request_switch("stuck", settings_for("--never-ready"))
        with pytest.raises(EngineError, match="a change to 'stuck' is under way"):
            running.supervisor.request_switch("other", settings_for())
        await running.states.reach(State.STARTING, times=2)
        running.supervisor.stop()
        await running.task
        assert (await stuck).reason == "the appliance ended"
        with pytest.raises(EngineError, match="the appliance ends"):
            running.supervisor.request_switch("other", settings_for())
        assert running.processes() == []


async def test_a_switch_out_of_a_crash_loop(appliance, settings_for):
    flags = ("--fail-start", "RuntimeError: x")
    async with appliance(*flags, backoff_seconds=600, backoff_cap_seconds=600, settle_seconds=0) as running:
        await running.states.reach(State.BACKOFF)
        told = await running.supervisor.request_switch("good", settings_for())
        assert told.done
        assert (await status(running))["failed_starts"] == 0


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "https://evil.example", "content-type": "application/json"}, 403),
        ({"sec-fetch-site": "cross-site", "content-type": "application/json"}, 403),
        ({"content-type": "text/plain"}, 415),
    ],
)
async def test_a_page_of_another_site_can_not_restore(appliance, headers, code):
    async with appliance() as running:
        await running.states.reach(State.READY)
        async with running.http.post("/admin/restore", data=b"{}", headers=headers) as response:
            assert response.status == code


async def test_restore_wants_an_admin_key_where_there_are_some(appliance, tmp_path):
    keys = tmp_path / "admins"
    keys.write_text("op:0123456789abcdef\n")
    keys.chmod(0o600)
    async with appliance(admin_keys_file=keys) as running:
        await running.states.reach(State.READY)
        for headers, code in (({}, 401), ({"authorization": "Bearer 0123456789abcdef"}, 409)):
            async with running.http.post("/admin/restore", json={}, headers=headers) as response:
                assert response.status == code
