"""Request bodies, read before a request takes a place: bounded in size, in time and, all together, in memory.

A place in the engine or in the queue that is held by a client who sends slowly is a place less for all the others.
"""

import asyncio
from collections.abc import Iterable

from appliance import openai_error
from appliance.openai_error import ApiError

SILENCE_SECONDS = 30.0  # longest pause in the middle of a body
WHOLE_SECONDS = 300.0  # 32 MiB at 1 Mbit/s
_FREE_BYTES = 64 << 10  # of every body: small requests are served while large ones have filled the memory
_MOST_HELD_BYTES = 256 << 20  # together, until each is answered
_RETRY_AFTER_SECONDS = 5


class Bodies:
    """The bodies that are held at one time.

    Args:
        limit: most bytes of one body.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.most = max(_MOST_HELD_BYTES, limit)
        self.held = 0


class Body:
    """One request's body; counted as held until ``forget``."""

    def __init__(self, bodies: Bodies) -> None:
        self.complete = False
        self._bodies = bodies
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    def data(self) -> bytes:
        """What has been read."""
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def declared(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """The refusal of a body that is too large by its own account."""
        length = next((value for name, value in headers if name == b"content-length"), b"")
        too_large = length.isdigit() and int(length) > self._bodies.limit
        return openai_error.body_too_large(self._bodies.limit) if too_large else None

    def add(self, chunk: bytes, *, more: bool) -> ApiError | None:
        """Keep a piece, or say why not."""
        before = self._counted
        self._size += len(chunk)
        self._bodies.held += self._counted - before
        self._chunks.append(chunk)
        self.complete = not more
        if self._size > self._bodies.limit:
            return openai_error.body_too_large(self._bodies.limit)
        if self._counted and self._bodies.held > self._bodies.most:
            return openai_error.bodies_too_large(self._bodies.most, _RETRY_AFTER_SECONDS)
        return None

    def forget(self) -> None:
        """Let go of it."""
        self._bodies.held -= self._counted
        self._chunks.clear()
        self._size = 0

    @property
    def _counted(self) -> int:
        return max(0, self._size - _FREE_BYTES)


class Deadline:
    """Ends a wait for the next piece of a body."""

    def __init__(self) -> None:
        self._end = asyncio.get_running_loop().time() + WHOLE_SECONDS

    def next_piece(self) -> asyncio.Timeout:
        """``async with`` it around the wait for one piece; TimeoutError when it came too late."""
        return asyncio.timeout_at(min(self._end, asyncio.get_running_loop().time() + SILENCE_SECONDS))

    def refusal(self) -> ApiError:
        """What the client is told after TimeoutError."""
        if asyncio.get_running_loop().time() >= self._end:
            return openai_error.body_too_slow(f"the request body did not end within {WHOLE_SECONDS:g} s")
        return openai_error.body_too_slow(f"nothing more of the request body came for {SILENCE_SECONDS:g} s")
