"""uvicorn's HTTP/1.1 parser with the two limits that it lacks: on the size of a request's head, and on its time.

Without them one client fills the memory with a header that never ends, or holds connections that never ask anything.
llhttp itself refuses what smuggling is made of: two lengths, a length beside a transfer coding, bare line feeds.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from appliance.openai_error import ApiError

MOST_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0
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
        """Parse; a head that has not ended may be so long and no longer."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(ApiError(431, "head_too_large", f"the headers are larger than {MOST_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._in_head = False
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
        # An answer that is being written to an earlier request of this connection must not be mixed up with ours.
        if self.cycle is None or self.cycle.response_complete:
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(error.body)}\r\n\r\n".encode() + error.body)
        self.transport.close()
