"""OpenAI's error envelope, which every client library of that API knows how to read."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

Headers = Iterable[tuple[bytes, bytes]]


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
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def event(self) -> bytes:
        """The envelope as one server-sent event, for a stream that has begun."""
        return b"data: " + self.body + b"\n\n"


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
    headers = ((b"retry-after", str(retry_after).encode()),)
    return ApiError(503, "engine_not_ready", f"the engine is not ready: {state}", headers)


def engine_unreachable() -> ApiError:
    """The engine went away before it answered."""
    return ApiError(502, "engine_unreachable", "the engine ended or closed the connection before it answered")


def engine_lost() -> ApiError:
    """The engine went away in the middle of its answer."""
    return ApiError(502, "engine_lost", "the engine ended while it was writing this answer; it is incomplete")
