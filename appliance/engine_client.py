"""The proxy's client of the engine: HTTP/1.1 on its Unix socket, over connections that are kept.

Own code, because a client library costs as much as all the rest of the proxy and knows nothing of the rule below: a
short request takes 0.50 ms of a core through aiohttp with a connection for each, 0.40 ms with kept ones, 0.28 ms here
(EPYC, ``bench_proxy``'s stub that answers at once, in turns). llhttp parses, as in uvicorn.

The engine closes a connection that was idle for some seconds, perhaps just when the next request is on its way. A
Unix socket tells which it was: "connection reset" and "broken pipe" mean that the other end was closed with bytes
unread, so no program has had the whole request, and sending it again is safe. A plain end of file means that all of
it was read: then it is lost, whatever came of it.
"""

import asyncio
from typing import Any

import httptools

# uvicorn, and so vLLM, closes after 5 s of silence; younger connections are seldom closed under our hands.
KEPT_SECONDS = 3.0
_MOST_KEPT = 256
_CONNECT_SECONDS = 5.0
_MOST_BUFFERED_BYTES = 256 << 10  # of an answer that its client is slow to read

Headers = list[tuple[bytes, bytes]]


class EngineUnreachableError(Exception):
    """The engine has not got the whole request; another try is safe."""


class EngineLostError(Exception):
    """The connection ended before the answer did."""


class EngineClient:
    """Connections to one socket. Not thread-safe: one event loop."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._kept: list[Connection] = []  # the one that was used last stands last

    async def request(self, head: bytes, body: bytes, holder: "Holder") -> "Connection":
        """Send a request and wait for the head of its answer.

        Args:
            head: request line and headers with the blank line; it declares the body's length.
            body: of the request.
            holder: is shown the connection before anything can be waited for on it, so as to abandon it.

        Raises:
            EngineUnreachableError: the engine did not get it.
            EngineLostError: it may have got it and has not answered, or the request was abandoned.
        """
        kept = self._take()
        if kept is not None:
            try:
                return await _ask(kept, head, body, holder)
            except EngineUnreachableError:
                if holder.left:
                    raise
        return await _ask(await self._connect(), head, body, holder)

    def close(self) -> None:
        """End the connections that nobody uses."""
        for connection in self._kept:
            connection.abandon()
        self._kept.clear()

    def keep(self, connection: "Connection") -> None:
        """Take back a connection whose answer has been read to its end."""
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(connection)
        else:
            connection.abandon()

    def drop(self, connection: "Connection") -> None:
        """Forget a connection that has ended."""
        if connection in self._kept:
            self._kept.remove(connection)

    def _take(self) -> "Connection | None":
        if not self._kept:
            return None
        connection = self._kept.pop()
        if asyncio.get_running_loop().time() - connection.idle_since < KEPT_SECONDS:
            return connection
        connection.abandon()
        self.close()  # all the others are older
        return None

    async def _connect(self) -> "Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_unix_connection(lambda: Connection(self), self._socket)
        except OSError as error:  # TimeoutError is one
            raise EngineUnreachableError(str(error)) from error
        return connection


class Holder:
    """Who waits for an answer, and may leave before it has come.

    Attributes:
        left: the client has closed its connection.
        connection: what is abandoned then.
    """

    left = False
    connection: "Connection | None" = None

    def leave(self) -> None:
        """Nobody waits any more: close the connection, by which the engine knows."""
        self.left = True
        if self.connection is not None:
            self.connection.abandon()


async def _ask(connection: "Connection", head: bytes, body: bytes, holder: Holder) -> "Connection":
    """Use a connection for one request; it is the holder's to release once this has returned."""
    holder.connection = connection
    try:
        if holder.left:
            raise EngineLostError
        await connection.ask(head, body)
    except BaseException:
        holder.connection = None
        connection.abandon()
        raise
    return connection


class Connection(asyncio.Protocol):
    """One connection, and the answer that comes over it.

    Attributes:
        status: of the answer.
        headers: of the answer, names in small letters.
        idle_since: event loop's time of its last release.
    """

    status = 0
    idle_since = 0.0

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._idle = True
        self._lost = False
        self._unread = False  # the engine has closed without reading all that was sent
        self._paused = False
        self.headers: Headers = []
        self._chunks: list[bytes] = []
        self._begin()

    # --- what the proxy asks -------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """All of the answer has been read."""
        return self._complete and not self._chunks

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request and wait for the head of its answer.

        Raises:
            EngineUnreachableError: the engine did not get all of it.
            EngineLostError: it may have, and has not answered.
        """
        if self._lost:
            raise EngineUnreachableError
        self._begin()
        self._idle = False
        self._transport.writelines((head, body))
        while not self._answered:
            if self._lost:
                raise EngineUnreachableError if self._unread else EngineLostError
            await self._wait()

    async def read(self) -> bytes:
        """What has come of the answer's body; empty at its end.

        Raises:
            EngineLostError: the connection ended before the answer did, or was abandoned.
        """
        while not self._chunks:
            if self._complete:
                return b""
            if self._lost:
                raise EngineLostError
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            if not self._lost:
                self._transport.resume_reading()
        return data

    def release(self) -> None:
        """The answer is done with: keep the connection if nothing of it can still come, else close it."""
        if not self.ended or self._lost or not self._reusable:
            self.abandon()
            return
        self._idle = True
        self.idle_since = asyncio.get_running_loop().time()
        self._client.keep(self)

    def abandon(self) -> None:
        """Close the connection now; whoever waits for its answer gets EngineLostError."""
        self._lost = True
        self._transport.abort()
        self._wake()

    # --- asyncio's protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine has been reached."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse. Bytes that nobody asked for end the connection: they would be taken for the next answer."""
        try:
            if self._idle:
                raise EngineLostError
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, EngineLostError):
            self._reusable = False
            self.abandon()
            self._client.drop(self)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine has closed it, or we have."""
        self._lost = True
        self._unread = isinstance(exc, ConnectionResetError | BrokenPipeError)
        self._client.drop(self)
        self._wake()

    # --- httptools' callbacks ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins; a second one to the same request ends the connection."""
        if self._complete:
            raise EngineLostError

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer: those are dropped."""
        if not self._answered:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head has come."""
        self.status = self._parser.get_status_code()
        self._answered = self.status >= 200

    def on_body(self, body: bytes) -> None:
        """A piece of the body; a client that does not read stops the engine's writing instead of filling our memory."""
        self._chunks.append(body)
        self._size += len(body)
        if self._size > _MOST_BUFFERED_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The end of the answer; an interim one (1xx) is forgotten."""
        if not self._answered:
            self.headers = []
            return
        self._complete = True
        self._reusable = self._parser.should_keep_alive()

    # --- small steps ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.headers = []
        self._chunks = []
        self._size = 0
        self._answered = self._complete = self._reusable = False

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
