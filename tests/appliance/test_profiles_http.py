"""The switch over HTTP, with the fake engine: each profile here sets its flags."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.lifecycle import State
from tests.appliance.conftest import Running
from tests.appliance.test_profiles_file import write

JSON = {"content-type": "application/json"}
ADMIN = "an-operators-key-1234"


@pytest.fixture
def profiles(tmp_path: Path, model: Path) -> Callable[..., None]:
    """``profiles(name, **vllm flags)`` writes one of the user's."""

    def add(name: str, **flags: object) -> None:
        head = {"name": name, "description": "d", "model": str(model), "served_model_name": f"served-{name}"}
        profile = {**head, "vllm": flags, "needs": {"device": "cpu", "memory_gib": 0.01}}
        write(tmp_path / "profiles", json.dumps(profile), name)  # JSON is YAML

    return add


async def post(running: Running, body: object, **headers: str) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with running.http.post("/admin/profile", data=data, headers=JSON | headers) as answer:
        return answer.status, await answer.json()


async def told(running: Running, path: str = "/admin/profile") -> dict:
    return json.loads(await running.get(path))


async def ended(running: Running) -> dict:
    """What came of the switch, once it is over."""
    async with asyncio.timeout(60):
        while (outcome := await told(running))["state"] == "switching":  # noqa: ASYNC110  (as a client does)
            await asyncio.sleep(0.02)
    return outcome


async def test_a_switch_and_back(appliance, profiles, tmp_path: Path) -> None:
    profiles("one", seed=1)
    profiles("two", seed=2)
    async with appliance(profiles_dir=tmp_path / "profiles") as running:
        await running.states.reach(State.READY)
        assert await told(running) == {"current": None, "state": "idle"}
        before = running.supervisor.engine_pid
        accepted = {"name": "two", "state": "switching", "url": "/admin/profile"}
        assert await post(running, {"name": "two"}) == (202, accepted)
        assert await ended(running) == {"current": "two", "state": "done", "name": "two", "reason": ""}
        assert running.supervisor.engine_pid != before
        assert running.supervisor.settings.engine_args[:2] == ("--seed", "2")
        status = await told(running, "/status")
        assert (status["state"], status["profile"], status["model"]) == ("ready", "two", "served-two")
        assert (await running.post("/v1/completions", {}))[0] == 200
        assert (await post(running, {"name": ""}))[0] == 202
        assert (await ended(running))["current"] is None
        assert (await told(running, "/status"))["model"] == "fake-model"
        assert running.states.seen.count(State.READY) == 3


async def test_the_old_one_returns_when_the_new_one_does_not_get_ready(appliance, profiles, tmp_path: Path) -> None:
    profiles("good", seed=1)
    profiles("bad", **{"fail-start": "RuntimeError: no kernel image"})
    async with appliance(profiles_dir=tmp_path / "profiles") as running:
        await running.states.reach(State.READY)
        assert (await post(running, {"name": "good"}))[0] == 202
        await ended(running)
        assert (await post(running, {"name": "bad"}))[0] == 202
        outcome = await ended(running)
        assert (outcome["current"], outcome["state"], outcome["name"]) == ("good", "returned", "bad")
        assert "no kernel image" in outcome["reason"]
        await running.states.reach(State.READY, times=3)
        status = await told(running, "/status")
        assert (status["profile"], status["model"]) == ("good", "served-good")
        assert (await running.post("/v1/completions", {}))[0] == 200


async def test_streams_end_whole_and_waiting_requests_are_answered(appliance, profiles, tmp_path: Path) -> None:
    profiles("two", seed=2)
    async with appliance(profiles_dir=tmp_path / "profiles", hold_seconds=60.0) as running:
        await running.states.reach(State.READY)
        chunks = [f"data: {n}\n\n" for n in range(40)]
        script = {"script": {"chunks": chunks, "gap": 0.02}}
        streaming = asyncio.create_task(running.post("/v1/completions", script))
        await running.events.wait("request")
        assert (await post(running, {"name": "two"}))[0] == 202
        await running.states.reach(State.PREFLIGHT, times=2)
        assert streaming.done()  # the old engine was not ended before
        held = asyncio.create_task(running.post("/v1/completions", {}))
        assert (await streaming) == (200, "".join(chunks).encode())
        assert (await held)[0] == 200
        assert (await ended(running))["state"] == "done"


async def test_two_switches_at_once(appliance, profiles, tmp_path: Path) -> None:
    profiles("slow", **{"never-ready": True})
    profiles("two", seed=2)
    async with appliance(profiles_dir=tmp_path / "profiles") as running:
        await running.states.reach(State.READY)
        assert (await post(running, {"name": "slow"}))[0] == 202
        code, answer = await post(running, {"name": "two"})
        assert (code, answer["error"]["code"], answer["error"]["type"]) == (
            *(409, "switch_refused"),
            "invalid_request_error",
        )
        await running.states.reach(State.STARTING, times=2)
        assert (await post(running, {"name": "two"}))[0] == 409
        assert (await told(running))["state"] == "switching"


async def test_what_can_not_be_switched_to_leaves_the_engine_alone(appliance, profiles, tmp_path: Path) -> None:
    profiles("lost", **{"seed": 1})
    write(tmp_path / "profiles", "name: [", "broken")
    write(tmp_path / "profiles", (tmp_path / "profiles/lost.yaml").read_text().replace("fake-model", "gone"), "lost")
    async with appliance(profiles_dir=tmp_path / "profiles") as running:
        await running.states.reach(State.READY)
        for body, code, name, words in (
            ({"name": "none"}, 404, "profile_not_found", "profile='none': there is none; accepted: broken, demo, "),
            ({"name": "../lost"}, 404, "profile_not_found", "there is none"),
            ({"name": "broken"}, 422, "profile_invalid", "broken.yaml:1: not a profile's YAML: "),
            ({"name": "lost"}, 422, "profile_invalid", "gone: no such model folder"),
            ({"name": 7}, 400, "invalid_body", 'the body must be {"name": "PROFILE"}'),
            ({"name": "lost", "more": 1}, 400, "invalid_body", ""),
            (b"{", 400, "invalid_body", ""),
            (b'{"name": "' + b"x" * 5000 + b'"}', 400, "invalid_body", ""),
        ):
            status, answer = await post(running, body)
            assert (status, answer["error"]["code"]) == (code, name), answer
            assert words in answer["error"]["message"]
        assert running.states.seen == [State.PREFLIGHT, State.STARTING, State.READY]
        assert await told(running) == {"current": None, "state": "idle"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 403),
    ],
)
async def test_another_site_can_not_switch(appliance, profiles, tmp_path: Path, headers: dict, code: int) -> None:
    """The last one is a name of its own that a site has pointed at this machine."""
    profiles("two")
    async with appliance(profiles_dir=tmp_path / "profiles") as running:
        assert (await post(running, {"name": "two"}, **headers))[0] == code
        assert (await told(running))["state"] == "idle"


async def test_with_admin_keys_only_their_bearer_switches(appliance, profiles, tmp_path: Path) -> None:
    profiles("two")
    keys = tmp_path / "admin-keys"
    keys.write_text(f"op:{ADMIN}\n")
    keys.chmod(0o600)
    async with appliance(profiles_dir=tmp_path / "profiles", admin_keys_file=keys) as running:
        await running.states.reach(State.READY)
        basic = {"authorization": "Basic b3A6YW4tb3BlcmF0b3JzLWtleS0xMjM0"}
        for headers in ({}, {"authorization": "Bearer wrong-key-of-16-letters"}, basic):
            code, answer = await post(running, {"name": "two"}, **headers)
            assert (code, answer["error"]["code"]) == (401, "invalid_api_key")
        async with running.http.get("/admin/profiles") as answer:
            assert answer.status == 401
        bearer = {"authorization": f"Bearer {ADMIN}"}
        assert (await post(running, {"name": "two"}, origin="http://evil.example", **bearer))[0] == 403
        assert (await post(running, {"name": "two"}, **bearer))[0] == 202
        await running.states.reach(State.READY, times=2)


async def test_the_list(appliance, profiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles("two", seed=2)
    write(tmp_path / "profiles", "name: [", "broken")
    async with appliance(profiles_dir=tmp_path / "profiles", kv_cache_dtype="auto") as running:
        page = await told(running, "/admin/profiles")
        rows = {row["name"]: row for row in page["profiles"]}
        assert page["current"] is None
        assert rows["two"] == {
            **{"name": "two", "from": "yours", "description": "d", "model": rows["two"]["model"]},
            **{"replaced": [], "problems": [], "notes": []},
        }
        assert rows["two"]["model"].endswith("/fake-model")
        assert rows["demo"]["from"] == "shipped"
        assert rows["demo"]["replaced"] == [
            "kv_cache_dtype='auto' (MJOLNIR_KV_CACHE_DTYPE or the command line) replaces the profile's 'fp8'"
        ]
        assert "broken.yaml:1" in rows["broken"]["problems"][0]
