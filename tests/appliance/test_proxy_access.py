"""Keys, queue and hostile HTTP, in bytes over real sockets, in front of the fake engine."""

import asyncio
import contextlib
import json
from urllib.parse import urlsplit

import pytest

from appliance import keys, protocol
from appliance.errors import SettingsError
from appliance.lifecycle import State
from tests.appliance.test_proxy import raw

KEY, ADMIN, NEW = "client-key-0123456789", "admin-key-0123456789", "newer-key-0123456789"
HANG = {"script": {"chunks": ["data: 1\n\n"], "hang": True}}


def post(body: object, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def ask(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]).encode()


def auth(key: str) -> str:
    return f"Authorization: Bearer {key}"


@contextlib.asynccontextmanager
async def client(url, request):
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(request)
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.fixture
async def ready(appliance):
    async with appliance() as running:
        await running.states.reach(State.READY)
        yield running


@pytest.fixture
def files(tmp_path):
    made = {"api_keys_file": f"ann:{KEY}\n", "admin_keys_file": f"op:{ADMIN}\n"}
    for name, text in made.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return {name: tmp_path / name for name in made}


async def test_routes_and_their_keys(appliance, files, caplog):
    async with appliance(**files) as running:
        await running.states.reach(State.READY)
        for path, right in (("/v1/models", KEY), ("/status", ADMIN), ("/metrics", ADMIN)):
            for headers in ([], [auth(ADMIN if right == KEY else KEY)], [auth(right), auth(right)], [auth("")]):
                status, head, body = await raw(running.url, ask(path, *headers))
                error = json.loads(body)["error"]
                assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
                assert head["www-authenticate"].startswith(("Bearer", "Basic"))
            assert (await raw(running.url, ask(path, auth(right))))[0] == 200, path
        assert (await raw(running.url, ask("/nowhere")))[0] == 401
        assert (await raw(running.url, ask("/nowhere", auth(KEY))))[0] == 404
        assert (await raw(running.url, ask("/health")))[0] == (await raw(running.url, ask("/health/ready")))[0] == 200
        _, _, page = await raw(running.url, ask("/metrics", auth(ADMIN)))
        assert b'appliance_auth_failures_total{keys="api"} 5.0' in page
        assert b'appliance_auth_failures_total{keys="admin"} 8.0' in page
        _, _, status = await raw(running.url, ask("/status", auth(ADMIN)))
        for secret in (KEY, ADMIN):
            assert secret.encode() not in page + status
            assert secret not in caplog.text


async def test_a_key_is_exchanged_while_serving(appliance, files, monkeypatch):
    monkeypatch.setattr(keys, "_CHECK_SECONDS", 0.01)
    read = asyncio.Event()
    real = keys.KeyRing._take
    monkeypatch.setattr(keys.KeyRing, "_take", lambda self, reading: (real(self, reading), read.set()))
    async with appliance(**files) as running:
        await running.states.reach(State.READY)
        files["api_keys_file"].write_text(f"ann:{NEW}\n")
        while (await raw(running.url, ask("/version", auth(NEW))))[0] != 200:
            read.clear()
            await asyncio.wait_for(read.wait(), 10)
        assert (await raw(running.url, ask("/version", auth(KEY))))[0] == 401


async def test_the_network_is_refused_without_keys(appliance):
    with pytest.raises(SettingsError, match="without API keys"):
        async with appliance(host="0.0.0.0"):
            pass


async def test_full_is_429_and_a_leaver_frees_his_place(appliance):
    async with appliance(max_in_flight=1, max_queue=1) as running:
        await running.states.reach(State.READY)
        async with client(running.url, post(HANG)) as inside:
            await inside.readuntil(b"data: 1\n\n")
            async with client(running.url, post({})):
                await until(running, "appliance_queue_requests", 1)
                status, head, body = await raw(running.url, post({}))
                assert (status, head["retry-after"], json.loads(body)["error"]["code"]) == (429, "5", "queue_full")
                assert (await raw(running.url, ask("/v1/models")))[0] == 200
            await until(running, "appliance_queue_requests", 0)
            waiting = asyncio.create_task(raw(running.url, post({})))
            await until(running, "appliance_queue_requests", 1)
        assert (await waiting)[0] == 200
        samples = await running.samples()
        assert samples["appliance_queue_seconds_count"] == 2
        assert samples['appliance_http_requests_total{code="499",route="/v1/completions"}'] == 1


async def test_a_wait_has_an_end(appliance):
    async with appliance(max_in_flight=1, queue_seconds=0.05) as running:
        await running.states.reach(State.READY)
        async with client(running.url, post(HANG)) as inside:
            await inside.readuntil(b"data: 1\n\n")
            status, head, body = await raw(running.url, post({}))
            assert (status, head["retry-after"], json.loads(body)["error"]["code"]) == (503, "5", "queue_timeout")


async def test_a_request_is_held_while_the_engine_starts(appliance):
    async with appliance(hold_seconds=60) as running:
        status, _, body = await raw(running.url, post({"script": {"chunks": ["data: held\n\n"]}}))
        assert status == 200
        assert b"data: held\n\n" in body


async def until(running, name, value):
    """Each look is a request of its own, so this waits for the appliance and not for the clock."""
    async with asyncio.timeout(20):
        while (await running.samples())[name] != value:
            pass


def request(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([b"POST /tokenize HTTP/1.1", b"Host: x", b"Connection: close", *lines, b"", b""]) + body


SMUGGLED = {
    "two lengths": request(b"Content-Length: 2", b"Content-Length: 3", body=b"{}x"),
    "length and coding": request(b"Content-Length: 2", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding and length": request(b"Transfer-Encoding: chunked", b"Content-Length: 2", body=b"0\r\n\r\n"),
    "coding hidden": request(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "coding twice": request(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "signed length": request(b"Content-Length: +2", body=b"{}"),
    "length list": request(b"Content-Length: 2, 2", body=b"{}"),
    "folded": request(b"X: a", b" Transfer-Encoding: chunked", b"Content-Length: 2", b"", body=b"{}"),
    "bare line feed in a chunk": request(b"Transfer-Encoding: chunked", body=b"2\n{}\n0\n\n"),
    "coding of nothing": request(b"Transfer-Encoding: identity", b"Content-Length: 2", body=b"{}"),
    "two codings": request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=b"0\r\n\r\n"),
    "chunk without a size": request(b"Transfer-Encoding: chunked", body=b";a=b\r\n{}\r\n0\r\n\r\n"),
    "chunk of a negative size": request(b"Transfer-Encoding: chunked", body=b"-2\r\n{}\r\n0\r\n\r\n"),
    "chunk of 2 ** 64 bytes": request(b"Transfer-Encoding: chunked", body=b"10000000000000000\r\n{}\r\n0\r\n\r\n"),
    "chunk longer than it says": request(b"Transfer-Encoding: chunked", body=b"2\r\n{}GET /metrics\r\n0\r\n\r\n"),
    "bare carriage return": request(b"X: a\rTransfer-Encoding: chunked", b"Content-Length: 2", body=b"{}"),
    "bare line feed in the head": request(b"X: a\nTransfer-Encoding: chunked", b"Content-Length: 2", body=b"{}"),
    "space in a name": request(b"Content Length: 2", body=b"{}"),
    "line without a colon": request(b"Content-Length", body=b"{}"),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version without a number": b"GET /version HTTP/x\r\n\r\n",
    "nul in a header": request(b"X: a\0b", b"Content-Length: 2", body=b"{}"),
    "no method": b"\x16\x03\x01\x00\xa5 TLS\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
async def test_what_smuggling_is_made_of(ready, name):
    """One request goes in, at most one answer comes out, and the connection ends."""
    parts = urlsplit(ready.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(SMUGGLED[name])
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    if name == "folded":
        assert answer.count(b"HTTP/1.1 ") <= 1
        assert b"transfer-encoding: chunked\r\n\r\n0" not in answer
    else:
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "malformed_request", None)


async def test_extensions_and_trailers_of_a_chunked_body_go_no_further(ready):
    """They are allowed and mean nothing; the engine gets a length and the bytes."""
    body = b'2;a="b\\"c"\r\n{"\r\n5\r\na": 1\r\n1;x\r\n}\r\n0;y\r\nX-Trailer: 1\r\nAuthorization: Bearer t\r\n\r\n'
    status, _, answer = await raw(ready.url, request(b"Transfer-Encoding: chunked", b"Trailer: X-Trailer", body=body))
    assert (status, json.loads(answer)["bytes"]) == (200, 8)
    assert sorted(json.loads(answer)["headers"])[0] == ["content-length", "8"]
    assert {name for name, _ in json.loads(answer)["headers"]} == {"content-length", "host", "x-request-id"}


@pytest.mark.parametrize("target", ["http://x/metrics", "http://evil/v1/../health", "/v1/%2e%2e/metrics", "//metrics"])
async def test_other_forms_of_a_path_reach_nothing_of_the_engine(ready, target):
    status, _, body = await raw(ready.url, ask(target))
    assert b"vllm:" not in body or target == "http://x/metrics"  # the appliance's own page, behind its own key
    assert status in (200, 400, 404)
    if target != "http://x/metrics":
        assert status in (400, 404)


@pytest.mark.parametrize("header", [b"X: " + b"a" * (1 << 20), b"\r\n".join(b"X%d: a" % n for n in range(50_000))])
async def test_a_head_without_end_is_cut_off(ready, header):
    parts = urlsplit(ready.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET /version HTTP/1.1\r\n" + header)
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer
    writer.close()
    assert (await raw(ready.url, ask("/version")))[0] == 200


async def test_a_trailer_without_end_is_cut_off(ready):
    """uvicorn would keep it, whatever its size."""
    head = request(b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\nX: ")
    parts = urlsplit(ready.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    with contextlib.suppress(ConnectionError):
        writer.write(head + b"a" * (1 << 20))
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer
    writer.close()
    assert (await raw(ready.url, ask("/version")))[0] == 200


async def test_a_head_that_does_not_come_is_cut_off(ready, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    assert (await raw(ready.url, b"GET /version HTTP/1.1\r\nHost:"))[0] == 408


async def test_a_body_that_does_not_come_is_cut_off(ready, monkeypatch):
    monkeypatch.setattr("appliance.request_body.SILENCE_SECONDS", 0.05)
    status, _, body = await raw(ready.url, request(b"Content-Length: 10", body=b"{"))
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_too_slow")


async def test_a_body_that_is_no_json_is_the_engines_business(ready):
    bad = b'{"a": \xff\xfe nope'
    length = b"Content-Length: %d" % len(bad)
    status, _, body = await raw(ready.url, request(length, body=bad))
    assert (status, json.loads(body)["bytes"]) == (200, len(bad))
