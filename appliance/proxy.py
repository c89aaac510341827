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
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

from appliance import openai_error
from appliance.access_log import AccessLog
from appliance.engine_client import Connection, EngineClient, EngineLostError, EngineUnreachableError, Holder
from appliance.keys import Gate
from appliance.openai_error import ApiError
from appliance.queueing import Admission, AdmissionQueue, Answer, Turn
from appliance.request_body import Bodies, Body, Deadline

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
_RETRY_AFTER_SECONDS = 5


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


class Proxy:
    """The ASGI application in front of the engine."""

    def __init__(
        self,
        admission: Admission,
        queue: AdmissionQueue,
        gate: Gate,
        observer: Observer,
        max_body_bytes: int,
        access: AccessLog | None = None,
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._gate = gate
        self._observer = observer
        self._bodies = Bodies(max_body_bytes)
        self._access = access or AccessLog(on=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        started = time.perf_counter()
        path: bytes = scope["raw_path"]
        route = path.decode() if path in ROUTES else "other"
        exchange = _Exchange(scope, receive, send, Body(self._bodies))
        code = 500
        try:
            code = await self._answer(exchange, path)
        finally:
            exchange.close()
            seconds = time.perf_counter() - started
            self._observer.request_done(route, code, seconds)
            self._access.request_done(
                scope["method"], route, code, seconds, exchange.sent, exchange.client, exchange.request_id
            )

    async def _answer(self, exchange: "_Exchange", path: bytes) -> int:
        """Answer a request and return the status that was sent, 499 when its client left before."""
        name = self._gate.client(exchange.scope["headers"])
        if name is None:
            self._observer.auth_failed("api")
            return await exchange.refuse(openai_error.invalid_key())
        exchange.client = name
        # GET costs the engine nothing, and clients look with it whether it lives: it does not queue.
        queued = exchange.scope["method"] == "POST"
        refusal = _refusal(exchange.scope, path) or (self._queue.refusal(name) if queued else None)
        refusal = refusal or await exchange.read_body()
        if refusal is not None:
            return await exchange.refuse(refusal)
        if exchange.left:
            return 499
        exchange.watch_client()
        return await (self._answer_in_turn(exchange, path, name) if queued else self._answer_now(exchange, path))

    async def _answer_now(self, exchange: "_Exchange", path: bytes) -> int:
        """Answer a request that does not queue."""
        client = self._admission.admit()
        if isinstance(client, ApiError):
            return await exchange.refuse(client)
        self._admission.entered()
        try:
            return await exchange.relay(client, path, self._observer)
        finally:
            self._admission.left()

    async def _answer_in_turn(self, exchange: "_Exchange", path: bytes, name: str) -> int:
        """Answer a request once there is a place for it."""
        place: Answer | Turn | None = self._queue.enter(name)
        if isinstance(place, Turn):
            turn = place
            exchange.give_up = lambda: self._queue.give_up(turn)
            place = await self._queue.wait(turn)
            exchange.give_up = None
        if place is None:
            return 499
        if isinstance(place, ApiError):
            return await exchange.refuse(place)
        try:
            return await exchange.relay(place, path, self._observer)
        finally:
            self._queue.leave()


class _Exchange(Holder):
    """One request of a client.

    Attributes:
        client: name of the client's key.
        give_up: what else to do when the client leaves.
        sent: bytes of the answer's body.
    """

    give_up: Callable[[], None] | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send, body: Body) -> None:
        self.scope = scope
        self.sent = 0
        self.client = ""
        self._body = body
        self._receive = receive
        self._send = send
        self._last = b""  # bytes of the answer that were sent last
        self._watcher: asyncio.Task[None] | None = None
        given = _header(scope["headers"], b"x-request-id")
        usable = given is not None and _REQUEST_ID.fullmatch(given)
        self._request_id = given if usable and given else secrets.token_hex(16).encode()

    @property
    def request_id(self) -> str:
        """What the answer's ``x-request-id`` is."""
        return self._request_id.decode()

    def close(self) -> None:
        """Let go of everything."""
        self._body.forget()
        if self._watcher is not None:
            self._watcher.cancel()

    async def refuse(self, error: ApiError) -> int:
        """Answer in the engine's place."""
        body = error.body
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._begin(error.status, [*headers, *error.headers])
        await self._write(body, more=False)
        return error.status

    async def read_body(self) -> ApiError | None:
        """Read the body to its end, or until the client leaves; returns why it is refused."""
        refusal = self._body.declared(self.scope["headers"])
        deadline = Deadline()
        while refusal is None and not self._body.complete:
            try:
                async with deadline.next_piece():
                    message = await self._receive()
            except TimeoutError:
                return deadline.refusal()
            if message["type"] == "http.disconnect":
                self.left = True
                return None
            refusal = self._body.add(message.get("body", b""), more=message.get("more_body", False))
        return refusal

    def watch_client(self) -> None:
        """Have ``leave`` called when the client closes its connection; only after the body has been read."""
        self._watcher = asyncio.create_task(self._watch_client())

    async def _watch_client(self) -> None:
        # At the end of the answer this comes too: then there is nothing left to abandon.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()
        if self.give_up is not None:
            self.give_up()

    async def relay(self, client: EngineClient, path: bytes, observer: Observer) -> int:
        """Send the request to the engine and its answer to the client."""
        body = self._body.data
        head = _head(self.scope, path, self._request_id, len(body))
        if head is None:
            return await self.refuse(openai_error.malformed("a header holds a control character"))
        try:
            response = await client.request(head, body, self)
        except EngineUnreachableError:  # it has not seen the request: another try is safe
            return 499 if self.left else await self.refuse(openai_error.not_ready("gone", _RETRY_AFTER_SECONDS))
        except EngineLostError:
            return 499 if self.left else await self.refuse(openai_error.engine_unreachable())
        try:
            return await self._answer_with(response, observer)
        finally:
            # First, for by now the connection may be another's.
            self.connection = None
            response.release()

    async def _answer_with(self, response: Connection, observer: Observer) -> int:
        """Pass on the engine's answer.

        A stream begins with its first event and not with the engine's header, which vLLM sends before the prompt is
        read: until then an engine that is lost costs a 502, and a router may still ask another board.
        """
        content_type = _header(response.headers, b"content-type") or b""
        if content_type.partition(b";")[0].strip().lower() != b"text/event-stream":
            await self._copy(response)
            return response.status
        try:
            first = await response.read()
        except EngineLostError:
            return 499 if self.left else await self.refuse(openai_error.engine_unreachable())
        await self._stream(response, first, observer)
        return response.status

    async def _copy(self, response: Connection) -> None:
        """An answer that is not a stream of events."""
        await self._begin(response.status, _returned(response.headers))
        try:
            await self._pass_on(response, await response.read())
        except EngineLostError:
            # Returning without the end makes the server cut the connection: the client must not take what it
            # has for the whole.
            return

    async def _stream(self, response: Connection, first: bytes, observer: Observer) -> None:
        """Server-sent events, each as soon as it is there."""
        headers = [header for header in _returned(response.headers) if header[0] != b"cache-control"]
        await self._begin(response.status, [*headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        observer.stream_opened()
        try:
            await self._pass_on(response, first)
        except EngineLostError:
            if self.left:
                return
            # An event that was cut off is ended first, so that the error is an event of its own.
            gap = b"" if self._last == b"\n\n" else b"\n\n"
            await self._write(gap + openai_error.engine_lost().event, more=False)
        finally:
            observer.stream_closed()

    async def _pass_on(self, response: Connection, chunk: bytes) -> None:
        """The body from a first piece to its end.

        Raises:
            EngineLostError: it does not end.
        """
        while True:
            self._last = chunk[-2:]
            more = not response.ended
            await self._write(chunk, more=more)
            if not more:
                return
            chunk = await response.read()

    async def _write(self, chunk: bytes, *, more: bool) -> None:
        self.sent += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
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


def _head(scope: Scope, path: bytes, request_id: bytes, length: int) -> bytes | None:
    """Head of the request to the engine; None if it can't be written safely.

    llhttp lets no control character into a header or a query, so this is the second lock on that door.
    """
    query: bytes = scope["query_string"]
    headers: RawHeaders = scope["headers"]
    lines = [scope["method"].encode() + b" " + path + (b"?" + query if query else b"") + b" HTTP/1.1", b"host: engine"]
    dropped = _NOT_FORWARDED | _named_by_connection(headers)
    lines += [name + b": " + value for name, value in headers if name not in dropped]
    lines += [b"x-request-id: " + request_id, b"content-length: %d" % length, b"", b""]
    head = b"\r\n".join(lines)
    # Each line has its line feed and carriage return and no other one.
    sound = head.count(b"\n") == head.count(b"\r") == len(lines) - 1 and b"\0" not in head and b" " not in query
    return head if sound else None


def _returned(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Headers of the answer to the client."""
    dropped = _NOT_RETURNED | _named_by_connection(headers)
    return [header for header in headers if header[0] not in dropped]


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    """Headers that `Connection` declares to be for the next hop only."""
    lines = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for line in lines for token in line.split(b",")}


def _header(headers: RawHeaders, wanted: bytes) -> bytes | None:
    """Value of a header whose name is given in small letters, as uvicorn and EngineClient give them."""
    return next((value for name, value in headers if name == wanted), None)
