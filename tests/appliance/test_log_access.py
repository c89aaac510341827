"""One line for each request, and nothing of what the client said."""

import logging

import pytest

from appliance import access_log
from appliance.access_log import AccessLog
from appliance.lifecycle import State

KEY = "a-key-of-sixteen-and-more"
FIELDS = ("method", "route", "status", "bytes", "key", "request_id")


def told(caplog) -> list[tuple]:
    records = [record for record in caplog.records if record.name == "access"]
    return [tuple(getattr(record, name) for name in FIELDS) for record in records]


@pytest.fixture
def info(caplog):
    caplog.set_level(logging.INFO)
    return caplog


async def test_requests_in_the_log(appliance, tmp_path, info):
    (tmp_path / "keys").write_text(f"ann:{KEY}\n")
    async with appliance(api_keys_file=tmp_path / "keys") as running:
        await running.states.reach(State.READY)
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "one", "cookie": "session=c00kie"}
        prompt = {"prompt": "a private matter", "script": {"chunks": ["data: 12345\n\n", "data: 6\n\n"]}}
        async with running.http.post("/v1/completions?user=joe", json=prompt, headers=headers) as answer:
            size = len(await answer.read())
        async with running.http.get("/wp-admin?x=hostile", headers={**headers, "x-request-id": "two"}) as answer:
            missing = len(await answer.read())
        async with running.http.get(
            "/v1/models", headers={"x-request-id": "three", "authorization": "Bearer no"}
        ) as answer:
            refused = len(await answer.read())
        await running.get("/health")
    assert told(info) == [
        ("POST", "/v1/completions", 200, size, "ann", "one"),
        ("GET", "other", 404, missing, "ann", "two"),
        ("GET", "/v1/models", 401, refused, None, "three"),
    ]
    line = next(record for record in info.records if record.name == "access")
    assert line.getMessage() == f"POST /v1/completions 200 {line.seconds:.3f} s {size} bytes key=ann id=one"
    for secret in (KEY, "private", "joe", "c00kie", "wp-admin", "hostile"):
        assert secret not in info.text


async def test_it_can_be_left_off(appliance, info):
    async with appliance(access_log=False) as running:
        await running.states.reach(State.READY)
        assert (await running.post("/v1/completions", {}))[0] == 200
    assert told(info) == []


def test_a_flood_of_requests_is_held_back_and_counted(info, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(access_log.time, "monotonic", lambda: now[0])
    log = AccessLog(on=True)
    for _ in range(5000):
        log.request_done("GE\nT", "other", 404, 0.001, 10, "", "id")
    now[0] += 10.0
    log.request_done("GET", "other", 404, 0.001, 10, "", "id")
    assert len(info.records) == access_log.BURST_LINES + 2
    assert info.records[-2].dropped == 5000 - access_log.BURST_LINES
    assert info.records[0].method == "other"
