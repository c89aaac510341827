"""The HTTP surface: health, status and metrics of the appliance; every other path goes to the proxy."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from appliance import exposition, openai_error
from appliance.command import served_name
from appliance.events import page_router
from appliance.faults import Fault
from appliance.keys import Gate
from appliance.lifecycle import State
from appliance.metrics import Metrics
from appliance.policy import POLICIES
from appliance.proxy import Proxy, Receive, Scope, Send
from appliance.pulse import Pulse
from appliance.supervisor import Supervisor
from appliance.t5share import Verdict
from mjolnir import __version__

# What a load balancer or Docker's health check asks without a key.
OPEN = frozenset((b"/health", b"/health/ready"))


class ProgressReport(BaseModel):
    """Where a start is."""

    phase: str
    percent: int | None


class FaultReport(BaseModel):
    """Why the engine was last lost."""

    cause: str
    text: str
    stage: str
    advice: str


class SwitchReport(BaseModel):
    """What came of the last request for another engine."""

    name: str
    done: bool
    reason: str


class StatusReport(BaseModel):
    """What `/status` answers."""

    version: str
    state: State
    progress: ProgressReport | None
    last_fault: FaultReport | None
    restarts: int
    failed_starts: int
    rung: str
    last_switch: SwitchReport | None
    model: str
    profile: str | None
    url: str
    uptime_seconds: float
    ready_seconds: float | None
    t5_share: dict[str, Any]
    queue: dict[str, int]
    counters: dict[str, int]
    groups: list[dict[str, Any]]
    events: list[dict[str, Any]]
    log_tail: list[str]


class Reporter:
    """Puts together what `/status` and the terminal show.

    Attributes:
        share: tells T5's share of the last minutes' steps, once somebody watches it.
        waiting: tells how many requests wait for a place.
    """

    share: Callable[[], Verdict] = Verdict
    waiting: Callable[[], int] = int

    def __init__(self, supervisor: Supervisor, metrics: Metrics, url: str) -> None:
        self._supervisor = supervisor
        self._metrics = metrics
        self._url = url
        self._started = time.monotonic()

    def report(self, lines: int = 50) -> StatusReport:
        """The present status with the last lines of the engine's log."""
        status = self._supervisor.status(lines)
        fault, progress = status.fault, status.progress
        return StatusReport(
            version=__version__,
            state=status.state,
            progress=ProgressReport(phase=progress.phase, percent=progress.percent) if progress else None,
            last_fault=_told(fault) if fault else None,
            restarts=status.restarts,
            failed_starts=status.failed_starts,
            rung=status.rung,
            last_switch=SwitchReport(**vars(status.switched)) if status.switched else None,
            model=served_name(self._supervisor.settings),
            profile=self._supervisor.settings.profile or None,
            url=self._url,
            uptime_seconds=round(time.monotonic() - self._started, 3),
            ready_seconds=None if status.ready_seconds is None else round(status.ready_seconds, 3),
            t5_share=asdict(self.share()),
            queue={"waiting": self.waiting()},
            counters=self._metrics.tally.totals(),
            groups=[vars(group) for group in self._metrics.tally.groups],
            events=status.events,
            log_tail=status.log_tail,
        )


def _told(fault: Fault) -> FaultReport:
    advice = POLICIES[fault.cause].advice
    return FaultReport(cause=fault.cause, text=fault.text, stage=fault.stage, advice=advice)


def build_api(supervisor: Supervisor, metrics: Metrics, reporter: Reporter, pulse: Pulse) -> FastAPI:
    """The appliance's own routes."""
    api = FastAPI(title="Mjolnir", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    api.include_router(page_router(pulse))

    @api.get("/health")
    async def health() -> Response:
        """The supervisor is alive, whatever the engine does."""
        return PlainTextResponse("ok\n")

    @api.get("/health/ready")
    async def ready() -> Response:
        """The engine takes requests."""
        state = supervisor.state
        return JSONResponse({"state": state}, status_code=200 if state is State.READY else 503)

    @api.get("/status")
    async def status() -> StatusReport:
        """All that the appliance knows about itself."""
        return reporter.report()

    @api.get("/metrics")
    async def metrics_page() -> Response:
        """Prometheus text: ours, and the engine's when it answers."""
        page = await metrics.page_with_engine(supervisor.session_if_ready())
        return Response(page, headers={"content-type": exposition.CONTENT_TYPE})

    return api


class Appliance:
    """The ASGI application: our own paths, matched to the byte, to FastAPI; all the rest to the proxy.

    The proxy is not a route of FastAPI's: its middleware would run once a chunk of every stream, and its router
    matches decoded paths.
    """

    def __init__(self, api: FastAPI, proxy: Proxy, gate: Gate, metrics: Metrics) -> None:
        self._api = api
        self._proxy = proxy
        self._gate = gate
        self._metrics = metrics
        self._own = {route.path.encode() for route in api.routes if hasattr(route, "path")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["raw_path"] not in self._own:
            await self._proxy(scope, receive, send)
        elif scope["type"] == "http" and scope["raw_path"] not in OPEN and not self._admin(scope):
            self._metrics.auth_failed("admin")
            await openai_error.invalid_key(browser=True).send(send)
        else:
            await self._api(scope, receive, send)

    def _admin(self, scope: Scope) -> bool:
        return self._gate.admin(scope["headers"], safe=scope["method"] in ("GET", "HEAD"))
