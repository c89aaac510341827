"""The status page at ``/``, its two files, and the stream of server-sent events that keeps it live.

The page loads nothing from elsewhere and its policy forbids it to: scripts, styles and connections are our own.
Behind a reverse proxy every address is relative to the page's.
"""

import hashlib
from collections.abc import Callable
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from appliance.pulse import Pulse, TooManyViewersError

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
EVENTS = "/events"

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}


def page_router(pulse: Pulse) -> APIRouter:
    """Routes of the page and of its events; the caller runs the pulse (``pulse.run()``)."""
    router = APIRouter()
    for path, (name, kind) in FILES.items():
        router.add_api_route(path, _file(name, kind), methods=["GET"], response_model=None)

    @router.get(EVENTS)
    async def events() -> Response:
        """What happens, as it happens."""
        try:
            pulse.admit()
        except TooManyViewersError:
            return PlainTextResponse("too many open status pages\n", 503, {"retry-after": "10"})
        return StreamingResponse(pulse.watch(), headers=_STREAM_HEADERS, media_type="text/event-stream")

    return router


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    """A route's handler that serves a file of the package from memory."""
    body = resources.files("appliance").joinpath("page", name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}

    def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return serve
