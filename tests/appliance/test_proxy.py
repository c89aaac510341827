"""The proxy over real sockets, in front of the fake engine."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from appliance.lifecycle import State
from appliance.proxy import ROUTES

TEXT = ['data: {"a": "ü"}\n\n', "data: half", " an event\n\n", ": comment\r\n\r\n", "\0\x7f", "data: [DONE]\n\n"]


async def raw(url: str, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are, without a client library that would tidy them up."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, body


def get(target: str, method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode("latin-1")


@pytest.fixture
async def ready(appliance):
    async with appliance() as running:
        await running.states.reach(State.READY)
        yield running


async def test_a_stream_is_passed_on_byte_for_byte(ready):
    async with ready.http.post("/v1/completions", json={"script": {"chunks": TEXT}}) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert await response.read() == "".join(TEXT).encode()


async def test_a_chunk_does_not_wait_for_the_next_one(ready):
    async with ready.http.post(
        "/v1/completions", json={"script": {"chunks": ["data: 1\n\n"], "hang": True}}
    ) as response:
        assert await asyncio.wait_for(response.content.readany(), 10) == b"data: 1\n\n"


async def test_an_error_of_the_engine_is_passed_on_as_it_is(ready):
    script = {"status": 422, "type": "application/json", "chunks": ['{"error":', ' "x"}']}
    assert await ready.post("/v1/chat/completions", {"script": script}) == (422, b'{"error": "x"}')


async def test_megabytes_pass_both_ways(ready):
    blob = "x" * (5 << 20)
    status, body = await ready.post("/tokenize", {"blob": blob})
    assert (status, json.loads(body)["bytes"]) == (200, len(json.dumps({"blob": blob})))
    script = {"type": "application/json", "chunks": [blob]}
    assert await ready.post("/v1/completions", {"script": script}) == (200, blob.encode())


@pytest.mark.parametrize("script", [{"chunks": ["data: 1\n\n"], "hang": True}, {"hang_first": True}])
async def test_a_client_that_leaves_cancels_its_request_in_the_engine(ready, script):
    body = json.dumps({"script": script}).encode()
    parts = urlsplit(ready.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await ready.events.wait("request")
    if "chunks" in script:
        await reader.readuntil(b"data: 1\n\n")
    writer.close()
    await writer.wait_closed()
    await ready.events.wait("cancelled")
    code = "200" if "chunks" in script else "499"
    samples = await ready.samples()
    assert samples[f'appliance_http_requests_total{{code="{code}",route="/v1/completions"}}'] == 1
    assert samples["appliance_streams_in_flight"] == 0


HOSTILE = (
    *("/v1/../metrics", "/v1/models/../../health", "//v1/models", "/v1//models", "/v1/models/", "/v1%2Fmodels"),
    *("/%76ersion", "/v1/models;x", "/V1/models", "/v1/models%00", "/./version", "/%6detrics", "/metrics/"),
    *("/health%2Fready", "/sleep", "/collective_rpc", "/v1/load_lora_adapter", "/load", "/ping", "*", "/page"),
    *("/docs", "/openapi.json", "/redoc", "/v1/chat/completions/batch", "/v1/responses/resp_1", "/v1/models/fake"),
)


async def test_a_path_that_is_not_on_the_list_is_not_found(ready):
    for target in HOSTILE:
        status, headers, body = await raw(ready.url, get(target))
        assert (status, headers["content-type"]) == (404, "application/json"), target
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")
    samples = await ready.samples()
    assert samples['appliance_http_requests_total{code="404",route="other"}'] == len(HOSTILE)


async def test_a_wrong_method_is_refused(ready):
    for route, allowed in ROUTES.items():
        for method in {"DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "GET", "POST"} - {allowed}:
            status, headers, _ = await raw(ready.url, get(route.decode(), method))
            assert (status, headers["allow"]) == (405, allowed), (method, route)


async def test_the_query_arrives_unchanged(ready):
    _, _, body = await raw(ready.url, get("/version?a=%2F..%2F&b=c+d&&e"))
    assert json.loads(body)["path"] == "/version?a=%2F..%2F&b=c+d&&e"


async def test_headers_of_one_hop_stay_on_it(ready):
    request = (
        b"POST /tokenize HTTP/1.1\r\nHost: evil\r\nContent-Length: 2\r\nConnection: close, X-Secret-Hop\r\n"
        b"X-Secret-Hop: 1\r\nTE: trailers\r\nProxy-Authorization: x\r\nUpgrade: h2c\r\nKeep-Alive: 9\r\n"
        b"Authorization: Bearer k\r\nX-Request-Id: mine-1\r\nContent-Type: application/json\r\n\r\n{}"
    )
    status, headers, body = await raw(ready.url, request)
    assert status == 200
    arrived = json.loads(body)["headers"]
    names = [name for name, _ in arrived]
    assert sorted(names) == ["content-length", "content-type", "host", "x-request-id"]
    assert ["x-request-id", "mine-1"] in arrived
    assert ["host", "engine"] in arrived
    assert headers["x-request-id"] == "mine-1"
    assert headers["x-kept"] == "yes"
    assert "x-hop" not in headers
    assert "server" not in headers


async def test_a_request_id_that_can_not_be_used_is_replaced(ready):
    for given in ("", "two words", "x" * 129):
        request = f"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: {given}\r\nConnection: close\r\n\r\n"
        _, headers, _ = await raw(ready.url, request.encode())
        assert len(headers["x-request-id"]) == 32, given


async def test_a_body_above_the_limit_is_refused(appliance):
    async with appliance(max_body_mib=1) as running:
        await running.states.reach(State.READY)
        limit = 1 << 20
        declared = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {limit + 1}\r\n\r\n".encode()
        status, _, body = await raw(running.url, declared)
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        chunk = b"%x\r\n%s\r\n" % (limit // 2 + 1, b"x" * (limit // 2 + 1))
        chunked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 2
        assert (await raw(running.url, chunked))[0] == 413
        async with running.http.post("/tokenize", data=b"x" * limit) as response:
            assert (await response.json())["bytes"] == limit


async def test_before_the_engine_is_ready_the_answer_is_503(appliance):
    async with appliance("--never-ready") as running:
        await running.events.wait("serving")
        async with running.http.post("/v1/completions", json={}) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "5"
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_not_ready")
            assert "starting" in error["message"]
        async with running.http.get("/health") as response:
            assert response.status == 200
        async with running.http.get("/health/ready") as response:
            assert (response.status, await response.json()) == (503, {"state": "starting"})


async def test_an_engine_that_dies_in_a_stream_leaves_an_error_event_and_no_done(ready):
    script = {"chunks": ["data: 1\n\n", "data: cut"], "gap": 0.05, "die": True}
    status, body = await ready.post("/v1/completions", {"script": script})
    assert status == 200
    assert body.startswith(b"data: 1\n\ndata: cut\n\ndata: {")
    assert body.endswith(b"}\n\n")
    assert json.loads(body.rpartition(b"data: ")[2])["error"]["code"] == "engine_lost"
    assert b"[DONE]" not in body


async def test_an_engine_that_dies_before_it_answers_is_a_502(ready):
    status, body = await ready.post("/v1/completions", {"script": {"die_first": True}})
    assert (status, json.loads(body)["error"]["code"]) == (502, "engine_unreachable")


async def test_a_request_that_does_not_reach_the_engine_may_be_tried_again(ready):
    """Between an engine's death and the end of its last process the state is still ready."""
    ready.supervisor.socket.unlink()
    async with ready.http.post("/v1/completions", json={}) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "5")
        assert (await response.json())["error"]["code"] == "engine_not_ready"


async def test_an_engine_that_dies_in_a_plain_answer_cuts_the_connection(ready):
    """Ending the response in order would pass half an answer off as a whole one."""
    body = json.dumps(
        {"script": {"type": "application/json", "chunks": ['{"half":'], "gap": 0.05, "die": True}}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    status, headers, answer = await raw(ready.url, head + body)
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    assert b'{"half":' in answer
    assert not answer.endswith(b"0\r\n\r\n")
