"""The way of a request to the engine and of its answer back: allow-listed, byte for byte, unbuffered.

A raw ASGI application: with 64 streams of 30 chunks a second each, a framework's response objects would cost more
than the forwarding itself.

The allow-list holds what an OpenAI client needs and nothing that changes or reveals the engine; vLLM serves some
forty more routes on the same socket (profiler, sleep, weights, LoRA loading, batch, metrics), none of which its
own ``--api-key`` guards. A path must match to the byte, before any decoding: there is nothing to normalise and so
nothing to get wrong. ``GET /v1/models/{id}`` and the stored responses of ``/v1/responses/{id}`` are left out:
vLLM 0.32.0 does not serve the first and keeps the second in memory only on request.
"""

import asyncio
import io
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

import aiohttp
from yarl import URL

from appliance import openai_error
from appliance.keys import Gate
from appliance.openai_error import ApiError
from appliance.queueing import Admission, AdmissionQueue, Answer, Turn

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = Iterable[tuple[bytes, bytes]]

ROUTES: dict[bytes, str] = {
    b"/v1/chat/completions": "POST",
    b"/v1/completions": "POST",
    b"/v1/responses": "POST",
    b"/v1/embeddings": "POST",
    b"/v1/models": "GET",
    b"/tokenize": "POST",
    b"/detokenize": "POST",
    b"/version": "GET",
}

_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
# The key has done its part here; the engine, and its log, have no use for it.
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", b"authorization", b"cookie"}
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server", b"x-request-id", b"x-accel-buffering"}
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_LARGE_BODY_BYTES = 1 << 20
_RETRY_AFTER_SECONDS = 5
_BODY_SECONDS = 30.0  # longest silence in the middle of a request body
_QUEUED_BODY_BYTES = 1 << 20  # how much of its body is read from a client that waits
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)


class Observer(Protocol):
    """Who is told about every request."""

    def request_done(self, route: str, code: int, seconds: float) -> None:
        """A request has been answered, or its client has left."""
        ...

    def auth_failed(self, keys: str) -> None:
        """A request had no valid key; ``keys`` is "api" or "admin"."""
        ...

    def stream_opened(self) -> None:
        """A stream of server-sent events has begun."""
        ...

    def stream_closed(self) -> None:
        """A stream of server-sent events has ended."""
        ...


def engine_session(socket: str) -> aiohttp.ClientSession:
    """A client of the engine on its Unix socket.

    One connection a request: they are cheap on a Unix socket, closing one is what tells vLLM that its client has
    left, and a kept one may be closed by the engine just when it is used again.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(socket, limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
    )


class Proxy:
    """The ASGI application in front of the engine."""

    def __init__(
        self, admission: Admission, queue: AdmissionQueue, gate: Gate, observer: Observer, max_body_bytes: int
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._gate = gate
        self._observer = observer
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        started = time.perf_counter()
        path: bytes = scope["raw_path"]
        route = path.decode() if path in ROUTES else "other"
        exchange = _Exchange(scope, receive, send)
        code = 500
        try:
            code = await self._answer(exchange, path)
        finally:
            self._observer.request_done(route, code, time.perf_counter() - started)

    async def _answer(self, exchange: "_Exchange", path: bytes) -> int:
        """Answer a request and return the status that was sent, 499 when its client left before."""
        client = self._gate.client(exchange.scope["headers"])
        if client is None:
            self._observer.auth_failed("api")
            return await exchange.refuse(openai_error.invalid_key())
        refusal = _refusal(exchange.scope, path)
        if refusal is not None:
            return await exchange.refuse(refusal)
        if exchange.scope["method"] == "GET":  # costs the engine nothing, and clients look with it whether it lives
            return await self._answer_now(exchange, path)
        place: Answer | Turn | None = self._queue.enter(client)
        if isinstance(place, Turn):
            place = await self._wait(exchange, place)
        if place is None:
            return 499
        if isinstance(place, ApiError):
            return await exchange.refuse(place)
        try:
            return await self._run(exchange, place, path)
        finally:
            self._queue.leave()

    async def _answer_now(self, exchange: "_Exchange", path: bytes) -> int:
        """Answer a request that does not queue."""
        session = self._admission.admit()
        if isinstance(session, ApiError):
            return await exchange.refuse(session)
        self._admission.entered()
        try:
            return await self._run(exchange, session, path)
        finally:
            self._admission.left()

    async def _wait(self, exchange: "_Exchange", turn: Turn) -> Answer | None:
        """Wait in the queue; None when the client has left it."""
        waiting = asyncio.create_task(self._queue.wait(turn))
        gone = asyncio.create_task(exchange.left_while_waiting())
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            return None
        except asyncio.CancelledError:
            if waiting.done():
                self._queue.forget(turn)
            raise
        finally:
            gone.cancel()
            if not waiting.done():
                waiting.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)

    async def _run(self, exchange: "_Exchange", session: aiohttp.ClientSession, path: bytes) -> int:
        """Read the body of an admitted request and have it answered."""
        body = await exchange.read_body(self._max_body_bytes)
        if isinstance(body, ApiError):
            return await exchange.refuse(body)
        if body is None:
            return 499
        return await self._forward(exchange, session, path, body)

    async def _forward(self, exchange: "_Exchange", session: aiohttp.ClientSession, path: bytes, body: bytes) -> int:
        """Run the exchange with the engine until it ends or the client leaves, whichever comes first."""
        relay = asyncio.create_task(exchange.relay(session, path, body, self._observer))
        gone = asyncio.create_task(exchange.client_gone())
        try:
            await asyncio.wait((relay, gone), return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                return relay.result()
            return exchange.status or 499
        finally:
            # Leaving the relay closes its connection, by which the engine knows that nobody waits any more.
            for task in (relay, gone):
                task.cancel()
            await asyncio.gather(relay, gone, return_exceptions=True)


class _Exchange:
    """One request of a client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.status = 0  # once the response has begun
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = False
        self._receive = receive
        self._send = send
        given = _header(scope["headers"], b"x-request-id")
        usable = given is not None and _REQUEST_ID.fullmatch(given)
        self._request_id = given if usable and given else uuid.uuid4().hex.encode()

    async def refuse(self, error: ApiError) -> int:
        """Answer in the engine's place."""
        body = error.body
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._begin(error.status, [*headers, *error.headers])
        await self._send({"type": "http.response.body", "body": body})
        return error.status

    async def read_body(self, limit: int) -> bytes | ApiError | None:
        """The request's body; an error when it is above the limit, None when the client has left."""
        declared = _header(self.scope["headers"], b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            return openai_error.body_too_large(limit)
        while not self._complete:
            try:
                async with asyncio.timeout(_BODY_SECONDS):
                    here = await self._read_some()
            except TimeoutError:
                return openai_error.body_too_slow(_BODY_SECONDS)
            if not here:
                return None
            if self._size > limit:
                return openai_error.body_too_large(limit)
        return b"".join(self._chunks)

    async def left_while_waiting(self) -> None:
        """Return when the client has closed its connection; what it sends until then is kept.

        Of a large body only the beginning is read. The rest stays in the client, whose leaving is then noticed
        once it has its turn.
        """
        while self._size <= _QUEUED_BODY_BYTES:
            if not await self._read_some():
                return
        await asyncio.Event().wait()

    async def _read_some(self) -> bool:
        """Keep the next piece of the body; False when the client has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            return False
        chunk: bytes = message.get("body", b"")
        self._size += len(chunk)
        self._chunks.append(chunk)
        self._complete = not message.get("more_body", False)
        return True

    async def client_gone(self) -> None:
        """Return when the client has closed its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def relay(self, session: aiohttp.ClientSession, path: bytes, body: bytes, observer: Observer) -> int:
        """Send the request to the engine and its answer to the client."""
        query: bytes = self.scope["query_string"]
        target = path.decode() + ("?" + query.decode("latin-1") if query else "")
        headers = _forwarded(self.scope["headers"], self._request_id)
        url = URL("http://engine" + target, encoded=True)
        # aiohttp warns about large byte strings, which it would write in one go.
        data = io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body or None
        try:
            response = await session.request(
                self.scope["method"], url, data=data, headers=headers, allow_redirects=False
            )
        except aiohttp.ClientConnectorError:  # it has not seen the request: another try is safe
            return await self.refuse(openai_error.not_ready("gone", _RETRY_AFTER_SECONDS))
        except _LOST:
            return await self.refuse(openai_error.engine_unreachable())
        try:
            if response.content_type == "text/event-stream":
                return await self._stream(response, observer)
            return await self._copy(response)
        finally:
            response.close()

    async def _copy(self, response: aiohttp.ClientResponse) -> int:
        """Pass on an answer that is not a stream of events."""
        await self._begin(response.status, _returned(response.raw_headers))
        try:
            async for chunk in response.content.iter_any():
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except _LOST:
            # Returning without the end makes the server cut the connection: the client must not take what it
            # has for the whole.
            return response.status
        await self._send({"type": "http.response.body", "body": b""})
        return response.status

    async def _stream(self, response: aiohttp.ClientResponse, observer: Observer) -> int:
        """Pass on server-sent events, each as soon as it is there.

        The answer begins with the first event and not with the engine's header, which vLLM sends before the prompt is
        read: until then an engine that is lost costs a 502, and a router may still ask another board.
        """
        chunks = response.content.iter_any()
        try:
            chunk = await anext(chunks, b"")
        except _LOST:
            return await self.refuse(openai_error.engine_unreachable())
        headers = [h for h in _returned(response.raw_headers) if h[0].lower() != b"cache-control"]
        await self._begin(response.status, [*headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        observer.stream_opened()
        last = b"\n\n"
        try:
            while chunk:
                last = chunk[-2:]
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await anext(chunks, b"")
        except _LOST:
            # An event that was cut off is ended first, so that the error is an event of its own.
            gap = b"" if last == b"\n\n" else b"\n\n"
            event = gap + openai_error.engine_lost().event
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            observer.stream_closed()
        await self._send({"type": "http.response.body", "body": b""})
        return response.status

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers.append((b"x-request-id", self._request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _refusal(scope: Scope, path: bytes) -> ApiError | None:
    """Why the allow-list does not let a request through."""
    allowed = ROUTES.get(path)
    method: str = scope["method"]
    if allowed is None:
        return openai_error.not_found(method, path.decode("latin-1"))
    if method != allowed:
        return openai_error.method_not_allowed(method, path.decode(), allowed)
    return None


def _forwarded(headers: RawHeaders, request_id: bytes) -> list[tuple[str, str]]:
    """Headers of the request to the engine."""
    dropped = _NOT_FORWARDED | _named_by_connection(headers)
    kept = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers if n.lower() not in dropped]
    return [*kept, ("x-request-id", request_id.decode())]


def _returned(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Headers of the answer to the client."""
    dropped = _NOT_RETURNED | _named_by_connection(headers)
    return [(name.lower(), value) for name, value in headers if name.lower() not in dropped]


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    """Headers that `Connection` declares to be for the next hop only."""
    lines = [value for name, value in headers if name.lower() == b"connection"]
    return {token.strip().lower() for line in lines for token in line.split(b",")}


def _header(headers: RawHeaders, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name.lower() == wanted), None)
