"""uvicorn's HTTP/1.1 parser with what it lacks: limits on the size and the time of a head, and no trust in trailers.

Without them one client fills the memory with a header or a trailer that never ends, holds connections that never ask
anything, or adds headers to a request that has been checked already.
llhttp itself refuses what smuggling is made of: two lengths, a length beside a transfer coding, bare line feeds.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from appliance import openai_error
from appliance.openai_error import ApiError

MOST_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _stray_bytes = 0  # since the head, a piece of the body or the request ended
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Give the client time to ask."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; so much may come without getting on with the request, and no more."""
        self._stray_bytes += len(data)
        super().data_received(data)
        if self._stray_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, "head_too_large", f"the headers are larger than {MOST_HEAD_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are dropped, which uvicorn would add to the headers."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._stray_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has ended."""
        self._stray_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn would write plain text, and into the middle of an answer."""
        self._refuse(openai_error.malformed(msg))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._in_head = False
        self._stray_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, "head_too_slow", f"no whole request came within {HEAD_SECONDS:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; only close where the answer would be taken for a part of another one or for another one."""
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete
        if idle or (cycle.more_body and not (cycle.response_started or self._in_head or self.pipeline)):
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(error.body)}\r\n\r\n".encode() + error.body)
        if not idle:  # its application may not write after us
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()
