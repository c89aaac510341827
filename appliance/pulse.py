"""The last ten minutes as points in memory: for the status page's charts and for the alert on T5's share.

One task takes a point every two seconds, whether anyone looks or not. The engine is asked for its own figures only
while someone looks at the page: a scrape costs the engine a few milliseconds of its API process.
"""

import asyncio
import json
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any

import aiohttp

from appliance.board import BoardSampler, Sample
from appliance.eta import StartClock
from appliance.faults import Cause
from appliance.lifecycle import State
from appliance.phases import Progress
from appliance.t5share import Limits, Verdict, judge
from appliance.watcher import Watcher
from mjolnir.names import FallbackReason, StepKind

log = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0
POINTS = 300
LOG_LINES = 100
MOST_VIEWERS = 32
EVENTS = 50

_SCRAPE_SECONDS = 1.5
_MOST_SCRAPED_BYTES = 4 << 20
_ENGINE = {
    "generation_tokens": "vllm:generation_tokens_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache": "vllm:kv_cache_usage_perc",
}
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$", re.MULTILINE)

Json = dict[str, Any]


class TooManyViewersError(Exception):
    """No further viewer is taken."""


class Pulse(Watcher):
    """Takes the points and hands them to viewers as server-sent events.

    Args:
        report: the body of ``/status`` as JSON values, with so many lines of the log.
        board: the board's sampler, which someone else runs; None shows no board.
        engine: an HTTP session with the engine while it takes requests.
        limits: thresholds of the alert.
        period: seconds between points.
    """

    def __init__(
        self,
        report: Callable[[int], Json],
        board: BoardSampler | None = None,
        engine: Callable[[], aiohttp.ClientSession | None] = lambda: None,
        limits: Limits | None = None,
        period: float = PERIOD_SECONDS,
    ) -> None:
        self._report = report
        self._board = board
        self._engine = engine
        self._limits = limits or Limits()
        self._period = period
        self._start = StartClock()
        self._totals: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=POINTS)
        self._points: deque[Json] = deque(maxlen=POINTS)
        self._tokens: tuple[float, float] | None = None
        self._energy: Sample | None = None
        self._events: deque[Json] = deque(maxlen=EVENTS)
        self._viewers = 0
        self._ended = False
        self._tick = 0
        self._message: Json = {}
        self._log: list[str] = []
        self._ticked = asyncio.Condition()
        self.verdict = Verdict()

    # --- told by the supervisor ------------------------------------------------------------------------------

    def state_changed(self, state: State) -> None:
        """Follow a start from its beginning, and keep the change as an event."""
        self._note(str(state))
        if state is State.STARTING:
            self._start.begin(time.monotonic())
        else:
            self._start.abandon()

    def progressed(self, progress: Progress) -> None:
        """Follow a start."""
        self._start.progressed(time.monotonic(), progress)

    def became_ready(self, seconds: float) -> None:
        """Remember how long it took."""
        self._start.ready(seconds)
        self._note(f"the engine answers after {seconds:.1f} s")

    def restarting(self, cause: Cause) -> None:
        """Keep it as an event."""
        self._note(f"restart: {cause}")

    # --- the task --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take points until cancelled; then every viewer's stream ends."""
        try:
            while True:
                try:
                    await self.take()
                except Exception:
                    log.exception("no point for the status page")  # a bug of ours: the appliance serves on
                await asyncio.sleep(self._period)
        finally:
            self._ended = True
            async with self._ticked:
                self._ticked.notify_all()

    async def take(self) -> None:
        """Take one point now."""
        engine = await self._scrape() if self._viewers else {}
        now = time.monotonic()
        report = self._report(LOG_LINES)
        self._log = report.pop("log_tail", [])
        totals = report.get("counters", {})
        before = self._totals[-1][1] if self._totals else totals
        self._totals.append((now, totals))
        self.verdict = judge(self._totals, self.verdict.alert, self._limits)
        board = self._board.latest() if self._board is not None else None
        rate = self._rate(now, engine)
        watts = self._watts(board)
        self._points.append(_point(before, totals) | {"tokens": rate})
        self._message = {
            "status": report,
            "share": asdict(self.verdict) | {"window": self._limits.window},
            "eta": asdict(self._start.eta(now)),
            "engine": engine | {"tokens_per_second": rate},
            "board": _board(board, watts),
            "events": report.pop("events", None) or list(self._events),
            "point": self._points[-1],
            "period": self._period,
        }
        async with self._ticked:
            self._tick += 1
            self._ticked.notify_all()

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events for one viewer: ``history`` once, then ``tick`` with every point and ``log``.

        A viewer that comes back gets the whole history again, so no event needs an id.

        Raises:
            TooManyViewersError: there are enough; raised before the first event.
        """
        self.admit()
        self._viewers += 1
        try:
            yield b"retry: 2000\n\n"
            seen, lines = self._tick, list[str]()
            if seen:
                yield _event("history", self._message | {"points": list(self._points)})
            while not self._ended:
                if self._log != lines:
                    lines = self._log
                    yield _event("log", {"lines": lines})
                async with self._ticked:
                    # Bound to one value: the wait is over before the next turn of the loop.
                    await self._ticked.wait_for(lambda last=seen: self._tick != last or self._ended)  # type: ignore[misc]
                # A viewer that was too slow for a point gets all of them again.
                whole, seen = seen == 0 or self._tick > seen + 1, self._tick
                points = {"points": list(self._points)} if whole else {}
                yield _event("history" if whole else "tick", self._message | points)
        finally:
            self._viewers -= 1

    def admit(self) -> None:
        """Whether another viewer may come.

        Raises:
            TooManyViewersError: there are enough.
        """
        if self._viewers >= MOST_VIEWERS:
            raise TooManyViewersError

    # --- small steps -----------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self._events.append({"at": round(time.time(), 1), "text": text})

    async def _scrape(self) -> Json:
        """The engine's figures, summed over its engines; those that it does not show are missing."""
        http = self._engine()
        if http is None:
            return {}
        try:
            timeout = aiohttp.ClientTimeout(total=_SCRAPE_SECONDS)
            async with http.get("http://engine/metrics", timeout=timeout) as response:
                page = (await response.content.read(_MOST_SCRAPED_BYTES)).decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("the engine's metrics did not come: %r", error)
            return {}
        return engine_figures(page)

    def _rate(self, now: float, engine: Json) -> float | None:
        """Generated tokens a second since the last point; None when either is unknown or the engine is another."""
        count = engine.get("generation_tokens")
        before, self._tokens = self._tokens, None if count is None else (now, count)
        if before is None or count is None or count < before[1] or now <= before[0]:
            return None
        return float((count - before[1]) / (now - before[0]))

    def _watts(self, board: Sample | None) -> dict[str, float]:
        """Power by rail; of rails that only count energy, the mean since the last point."""
        if board is None:
            self._energy = None
            return {}
        watts = dict(board.reading.watts)
        before, self._energy = self._energy, board
        if before is not None and board.at > before.at:
            for rail, joules in board.joules.items():
                if rail not in watts and rail in before.joules:
                    watts[rail] = (joules - before.joules[rail]) / (board.at - before.at)
        return watts


def engine_figures(page: str) -> Json:
    """Figures of vLLM's metrics page by our names. Pure."""
    found: Json = {}
    names = {metric: name for name, metric in _ENGINE.items()}
    for metric, value in _SAMPLE.findall(page):
        if metric in names:
            try:
                found[names[metric]] = found.get(names[metric], 0.0) + float(value)
            except ValueError:
                continue
    return found


def _point(before: Mapping[str, int], totals: Mapping[str, int]) -> Json:
    """Steps since the last point: on T5, and on the fallback by reason where there were any."""
    grown = {name: max(0, value - before.get(name, 0)) for name, value in totals.items()}
    fallback = {str(reason): grown.get(f"fallback:{reason}", 0) for reason in FallbackReason}
    return {
        "at": round(time.time(), 1),
        "t5": sum(grown.get(f"t5:{kind}", 0) for kind in StepKind),
        "fallback": {reason: steps for reason, steps in fallback.items() if steps},
    }


def _board(sample: Sample | None, watts: Mapping[str, float]) -> Json | None:
    return None if sample is None else asdict(sample.reading) | {"watts": watts, "joules": dict(sample.joules)}


def _event(name: str, data: Json) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
