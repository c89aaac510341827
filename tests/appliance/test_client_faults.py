"""What clients do wrong, in front of the fake engine: they leave, read nothing, send slowly, or no HTTP."""

import asyncio
import contextlib
import json
import os
from urllib.parse import urlsplit

import pytest

from appliance.engine_client import Connection, EngineClient
from appliance.lifecycle import State
from tests.appliance.test_proxy import raw
from tests.appliance.test_proxy_access import ask, client, post, until

FIRST = b"data: 1\n\n"
STREAM = {"script": {"chunks": ["data: 1\n\n"], "hang": True}}
SILENT = {"script": {"hang_first": True}}
DONE = "data: [DONE]\n\n"


@pytest.fixture
async def ready(appliance):
    async with appliance() as running:
        await running.states.reach(State.READY)
        yield running


@pytest.fixture
async def connect():
    """``reader, writer = await connect(url, bytes)``; closed at the end whatever happens."""
    writers = []

    async def opened(url, request):
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writers.append(writer)
        writer.write(request)
        return reader, writer

    yield opened
    for writer in writers:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def count(events, name, number):
    for _ in range(number):
        await events.wait(name, 60)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_200_clients_that_leave_cost_nothing_afterwards(ready, connect):
    """Half of them in a stream, half before the answer has begun: every one is cancelled in the engine."""
    assert (await ready.post("/v1/completions", {}))[0] == 200
    await ready.events.wait("request")
    before = descriptors()
    requests = asyncio.create_task(count(ready.events, "request", 200))
    clients = [await connect(ready.url, post(STREAM if number % 2 else SILENT)) for number in range(200)]
    await requests
    for reader, _ in clients[1::2]:
        await reader.readuntil(FIRST)
    assert (await ready.samples())["appliance_streams_in_flight"] == 100
    cancelled = asyncio.create_task(count(ready.events, "cancelled", 200))
    for _, writer in clients:
        writer.transport.abort()
    await cancelled
    await until(ready, "appliance_streams_in_flight", 0)
    samples = await ready.samples()
    assert samples['appliance_http_requests_total{code="200",route="/v1/completions"}'] == 101
    assert samples['appliance_http_requests_total{code="499",route="/v1/completions"}'] == 100
    assert samples['vllm:num_requests_running{engine="0",model_name="fake"}'] == 0
    assert ready.supervisor._inside.count == 0
    async with asyncio.timeout(20):
        while descriptors() > before:
            await ready.samples()


async def test_a_client_that_never_reads_stops_the_engine_and_nobody_else(ready, monkeypatch, connect):
    held = []
    real = Connection.on_body

    def watched(self, body):
        real(self, body)
        held.append(self._size)

    monkeypatch.setattr(Connection, "on_body", watched)
    size, times = 1 << 20, 32  # the kernel's buffers take some 6 MiB
    lazy = {"script": {"chunks": ["x" * size], "repeat": times}}
    reader, _ = await connect(ready.url, post(lazy))
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(20):
        assert (await ready.post("/tokenize", {}))[0] == 200
    samples = await ready.samples()
    assert samples["appliance_streams_in_flight"] == 1
    assert samples['vllm:num_requests_running{engine="0",model_name="fake"}'] == 1
    assert max(held) < 1 << 20
    body = await asyncio.wait_for(reader.read(), 60)
    assert body.count(b"x") == size * times
    assert body.endswith(b"\r\n0\r\n\r\n")
    assert max(held) < 1 << 20


async def test_a_stop_under_20_streams_completes_each_or_says_so(appliance, connect):
    """Ten end within the drain, ten never would: a second signal ends those."""
    async with appliance(drain_seconds=60.0) as running:
        await running.states.reach(State.READY)
        short = {"script": {"chunks": ["data: 1\n\n"] * 5 + [DONE], "gap": 0.05}}
        drained = asyncio.create_task(count(running.events, "request", 20))
        streams = [await connect(running.url, post(short if number % 2 else STREAM)) for number in range(20)]
        for reader, _ in streams:
            await reader.readuntil(FIRST)
        await drained
        running.supervisor.stop()
        await running.states.reach(State.DRAINING)
        assert (await raw(running.url, post({})))[0] == 503
        for reader, _ in streams[1::2]:
            body = await asyncio.wait_for(reader.read(), 60)
            assert body.endswith(DONE.encode() + b"\r\n0\r\n\r\n")
        running.supervisor.stop()
        for reader, _ in streams[::2]:
            body = await asyncio.wait_for(reader.read(), 60)
            assert b"[DONE]" not in body
            assert body.endswith(b"}\n\n\r\n0\r\n\r\n")
            event = body.rpartition(b"data: ")[2].partition(b"\n\n")[0]
            assert json.loads(event)["error"]["code"] == "engine_lost"
        await asyncio.wait_for(asyncio.shield(running.task), 30)
        assert running.states.seen[-1] is State.STOPPED
        assert running.supervisor._inside.count == 0


def half(body=b"{}", length=2):
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


async def test_a_slow_body_holds_no_place(appliance, connect):
    """One place and no queue: with the place taken by who has not asked yet, this was a 429 for everybody else."""
    async with appliance(max_in_flight=1, max_queue=0) as running:
        await running.states.reach(State.READY)
        reader, writer = await connect(running.url, half(b"{"))
        assert (await raw(running.url, post({})))[0] == 200
        assert (await running.post("/v1/completions", {}))[0] == 200
        writer.write(b"}")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_trickles_for_ever_is_cut_off(ready, monkeypatch):
    monkeypatch.setattr("appliance.request_body.WHOLE_SECONDS", 0.05)
    status, _, body = await raw(ready.url, half(b"{"))
    error = json.loads(body)["error"]
    assert (status, error["code"], error["message"]) == (
        408,
        "body_too_slow",
        "the request body did not end within 0.05 s",
    )


async def test_no_body_is_asked_of_who_is_refused_anyway(appliance):
    """The answer comes before a byte of the body has been sent."""
    async with appliance(max_in_flight=1, max_queue=0) as running:
        await running.states.reach(State.READY)
        async with client(running.url, post(STREAM)) as inside:
            await inside.readuntil(FIRST)
            status, _, body = await raw(running.url, half(b"", 1000))
            assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")


async def test_bodies_are_bounded_together(appliance, monkeypatch, connect):
    monkeypatch.setattr("appliance.request_body._MOST_HELD_BYTES", 1 << 20)
    async with appliance(max_body_mib=1) as running:
        await running.states.reach(State.READY)
        held = running.stack._server.config.app._proxy._bodies
        size = 900 << 10
        _, first = await connect(running.url, half(b"x" * (size - 1), size))
        while held.held < size - (65 << 10):
            await running.samples()
        kept = half(b"x" * size, size).replace(b"Connection: close\r\n", b"")
        reader, second = await connect(running.url, kept)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 5\r\n" in head
        error = json.loads(await reader.readuntil(b"}}"))["error"]
        assert (error["type"], error["code"]) == ("server_error", "bodies_too_large")
        second.write(ask("/version"))  # what was refused is read past, and the connection goes on
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 OK")
        assert (await running.post("/tokenize", {"small": "x" * 1000}))[0] == 200
        first.close()
        await first.wait_closed()
        while held.held:
            await running.samples()
        assert (await raw(running.url, half(b"x" * size, size)))[0] == 200
        assert held.held == 0


async def test_requests_share_a_connection_and_nothing_else(ready, monkeypatch):
    """Two connections of clients, one to the engine: ids and headers stay with their requests."""
    connects = []
    real = EngineClient._connect
    monkeypatch.setattr(EngineClient, "_connect", lambda self: connects.append(1) or real(self))
    for number in range(6):
        line = f"X-Request-Id: id-{number}\r\nX-Only-{number}: 1\r\n"
        request = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{line}Content-Length: 2\r\n\r\n{{}}"
        status, headers, body = await raw(ready.url, request.encode())
        assert (status, headers["x-request-id"]) == (200, f"id-{number}")
        names = sorted(name for name, _ in json.loads(body)["headers"])
        assert names == ["content-length", "host", f"x-only-{number}", "x-request-id"]
    assert len(connects) == 1


async def test_an_error_of_the_engine_in_a_kept_connection_and_the_next_engine(ready):
    """Kept connections die with their engine: the first request to the next one is answered."""
    first = json.loads(await ready.get("/version"))["pid"]
    assert (await ready.post("/detokenize", {"code": 1}))[0] == 502
    await ready.states.reach(State.READY, times=2)
    assert json.loads(await ready.get("/version"))["pid"] != first


async def test_pipelined_requests_are_answered_in_turn(ready, connect):
    requests = [f"GET /version?{number} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for number in range(3)]
    reader, _ = await connect(ready.url, b"".join(requests) + ask("/version?3"))
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    positions = [answer.index(b"/version?%d" % number) for number in range(4)]
    assert positions == sorted(positions)


async def test_garbage_behind_a_request_is_not_its_answer(ready, connect):
    """A 400 would be taken for the answer to the first request."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(json.dumps(SILENT))
    reader, writer = await connect(ready.url, head + json.dumps(SILENT).encode())
    await ready.events.wait("request")
    writer.write(b"\0 no HTTP\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), 20) == b""
    await ready.events.wait("cancelled")


async def test_garbage_behind_a_stream_ends_it(ready, connect):
    reader, writer = await connect(ready.url, post(STREAM).replace(b"Connection: close\r\n", b""))
    await reader.readuntil(FIRST)
    writer.write(b"\0 no HTTP\r\n\r\n")
    rest = b""
    with contextlib.suppress(ConnectionError):
        rest = await asyncio.wait_for(reader.read(), 20)
    assert b"HTTP/1.1 400" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    await ready.events.wait("cancelled")


async def test_100_continue(ready, connect):
    reader, writer = await connect(ready.url, half(b"").replace(b"Host: x", b"Host: x\r\nExpect: 100-continue"))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"expect" not in answer


@pytest.mark.parametrize("held", [True, False])
async def test_who_leaves_the_queue_is_forgotten(appliance, held, connect):
    """Without a task for each: the queue itself is told."""
    async with appliance(max_in_flight=1, hold_seconds=60.0, **({} if held else {"max_queue": 4})) as running:
        if not held:
            await running.states.reach(State.READY)
            reader, inside = await connect(running.url, post(STREAM))
            await reader.readuntil(FIRST)
        _, writer = await connect(running.url, post({}))
        await until(running, "appliance_queue_requests", 1)
        writer.transport.abort()
        await until(running, "appliance_queue_requests", 0)
        if not held:
            inside.transport.abort()
            await running.events.wait("cancelled")
        await running.states.reach(State.READY)
        assert (await running.post("/v1/completions", {}))[0] == 200
        assert running.supervisor._inside.count == 0
