"""OpenAI's error envelope, which every client library of that API knows how to read."""

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Headers = Iterable[tuple[bytes, bytes]]

_KINDS = {429: "rate_limit_error"}


@dataclass(frozen=True)
class ApiError:
    """An answer that the appliance gives in the engine's place.

    Attributes:
        status: HTTP status.
        code: short name for programs.
        message: one sentence for people; says whether the request, the appliance or the engine is to blame.
        headers: further response headers.
    """

    status: int
    code: str
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    @property
    def body(self) -> bytes:
        """The envelope as JSON."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def event(self) -> bytes:
        """The envelope as one server-sent event, for a stream that has begun."""
        return b"data: " + self.body + b"\n\n"

    async def send(
        self, send: Callable[[MutableMapping[str, Any]], Awaitable[None]], *more: tuple[bytes, bytes]
    ) -> None:
        """The whole answer as an ASGI response, with ``more`` headers."""
        body = self.body
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": [*headers, *self.headers, *more]})
        await send({"type": "http.response.body", "body": body})


def not_found(method: str, path: str) -> ApiError:
    """The path is not one that the appliance serves."""
    return ApiError(404, "not_found", f"there is no such route: {method} {path[:200]}")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """The path is served, for another method."""
    message = f"{path} takes {allowed}, not {method}"
    return ApiError(405, "method_not_allowed", message, ((b"allow", allowed.encode()),))


def body_too_large(limit: int) -> ApiError:
    """The request's body is above the limit."""
    # The rest of the body is on its way; closing spares us reading it.
    headers = ((b"connection", b"close"),)
    return ApiError(413, "body_too_large", f"the request body is larger than {limit} bytes", headers)


def not_ready(state: str, retry_after: int) -> ApiError:
    """No engine can take the request now."""
    return ApiError(503, "engine_not_ready", f"the engine is not ready: {state}", _retry(retry_after))


def invalid_key(*, browser: bool = False) -> ApiError:
    """No key, or one that is not known; ``browser`` makes a browser ask for it."""
    challenge: tuple[tuple[bytes, bytes], ...] = ((b"www-authenticate", b'Bearer realm="mjolnir"'),)
    if browser:
        challenge = (*challenge, (b"www-authenticate", b'Basic realm="mjolnir", charset="UTF-8"'))
    message = "this needs a valid API key: Authorization: Bearer KEY"
    return ApiError(401, "invalid_api_key", message, challenge)


def body_too_slow(what: str) -> ApiError:
    """The request's body stopped coming, or does not end."""
    headers = ((b"connection", b"close"),)
    return ApiError(408, "body_too_slow", what, headers)


def bodies_too_large(limit: int, retry_after: int) -> ApiError:
    """Together the bodies that are held would be above the limit."""
    message = f"the requests that the appliance holds are together larger than {limit} bytes"
    return ApiError(503, "bodies_too_large", message, _retry(retry_after))


def malformed(problem: str) -> ApiError:
    """The request is no HTTP that we take."""
    return ApiError(400, "malformed_request", problem, ((b"connection", b"close"),))


def queue_full(limit: int, retry_after: int) -> ApiError:
    """As many requests wait as may."""
    message = f"the engine is busy and {limit} requests are waiting already"
    return ApiError(429, "queue_full", message, _retry(retry_after))


def queue_timeout(seconds: float, retry_after: int) -> ApiError:
    """A request waited as long as it may."""
    message = f"the engine is busy: there was no place for this request within {seconds:g} s"
    return ApiError(503, "queue_timeout", message, _retry(retry_after))


def engine_unreachable() -> ApiError:
    """The engine went away before it answered."""
    return ApiError(502, "engine_unreachable", "the engine ended or closed the connection before it answered")


def engine_lost() -> ApiError:
    """The engine went away in the middle of its answer."""
    return ApiError(502, "engine_lost", "the engine ended while it was writing this answer; it is incomplete")


def _retry(seconds: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(seconds).encode()),)
