"""The page at /metrics: the appliance's own figures, T5's step counters, and vLLM's metrics unrenamed."""

import logging
from collections.abc import Iterator

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from appliance import exposition
from appliance.faults import Cause
from appliance.ladder import Rung
from appliance.lifecycle import State
from appliance.phases import Phase, Progress
from appliance.proxy import ROUTES
from appliance.tally import Tally
from appliance.watcher import Watcher
from mjolnir.counters import FALLBACK_TOKENS, T5_TOKENS
from mjolnir.names import FallbackReason, KernelSource, StepKind

log = logging.getLogger(__name__)

NO_PHASE = "none"
OTHER_ROUTE = "other"

_SCRAPE_SECONDS = 2.0
_MOST_SCRAPED_BYTES = 16 << 20
_START_BUCKETS = (5, 10, 20, 30, 60, 120, 300, 600, 1200, 2700)
_REQUEST_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_QUEUE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GROUP_LABELS = ("group", "kv_format", "head_size", "page_size", "fallback", "reason")


class Metrics(Watcher):
    """Every metric of the appliance, in a registry of its own."""

    def __init__(self, tally: Tally) -> None:
        # One more series a counter, which no dashboard asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.tally = tally
        self.registry = registry = CollectorRegistry()
        self._state = Enum(
            "appliance_engine_state", "What the supervisor is doing.", states=list(State), registry=registry
        )
        self._phase = Enum(
            "appliance_engine_phase",
            "Stage of the engine's start.",
            states=[NO_PHASE, *Phase],
            registry=registry,
        )
        self._restarts = Counter(
            "appliance_engine_restarts", "Restarts of a lost engine.", ["cause"], registry=registry
        )
        self._rung = Enum(
            "appliance_engine_rung",
            "Rung of the degrade ladder: what is given up to keep the engine alive.",
            states=list(Rung),
            registry=registry,
        )
        self._strikes = Counter(
            "appliance_watchdog_strikes", "Looks at a ready engine that found no progress.", registry=registry
        )
        self._rotations = Counter("appliance_cache_rotations", "Compile caches that were put aside.", registry=registry)
        self._orphans = Counter(
            "appliance_orphans_ended", "Processes ended that a dead appliance had left.", registry=registry
        )
        self._starts = Histogram(
            "appliance_engine_start_seconds",
            "Time from an engine's start until it answered.",
            buckets=_START_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            "appliance_http_requests",
            "Requests by route; code 499 is a client that left before the answer began.",
            ["route", "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "appliance_http_request_seconds",
            "Time from a request to the end of its answer.",
            ["route"],
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._streams = Gauge(
            "appliance_streams_in_flight", "Streams of server-sent events that are open.", registry=registry
        )
        self._queue = Gauge("appliance_queue_requests", "Requests that wait for a place.", registry=registry)
        self._waits = Histogram(
            "appliance_queue_seconds",
            "How long requests waited that had to, whatever came of it.",
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self._auth_failures = Counter(
            "appliance_auth_failures", "Requests without a valid key.", ["keys"], registry=registry
        )
        self._scrape_errors = Counter(
            "appliance_scrape_errors", "Sources of this page that did not answer.", ["source"], registry=registry
        )
        self._seed()
        registry.register(_TallyCollector(tally, self._scrape_errors))

    def _seed(self) -> None:
        """Show every series from the start: a rate() over one that appears with its first event misses it."""
        for cause in Cause:
            self._restarts.labels(cause)
        for keys in ("api", "admin"):
            self._auth_failures.labels(keys)
        for source in ("counters", "engine"):
            self._scrape_errors.labels(source)
        for route in (*(route.decode() for route in ROUTES), OTHER_ROUTE):
            self._requests.labels(route, "404" if route == OTHER_ROUTE else "200")
            self._seconds.labels(route)

    def page(self) -> str:
        """Our part of the page."""
        return generate_latest(self.registry).decode()

    async def page_with_engine(self, session: aiohttp.ClientSession | None) -> str:
        """The whole page; without an answer from the engine its part is missing and the failure is counted."""
        engine = await self._scrape(session) if session is not None else ""
        try:
            return exposition.merge(self.page(), engine)
        except exposition.PageError as error:
            log.warning("the engine's metrics can't be read: %s", error)
            self._scrape_errors.labels("engine").inc()
            return self.page()

    async def _scrape(self, session: aiohttp.ClientSession) -> str:
        timeout = aiohttp.ClientTimeout(total=_SCRAPE_SECONDS)
        try:
            async with session.get("http://engine/metrics", timeout=timeout) as response:
                response.raise_for_status()
                page = await response.content.read(_MOST_SCRAPED_BYTES)
                return page.decode()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            log.debug("the engine's metrics did not come: %r", error)
            self._scrape_errors.labels("engine").inc()
            return ""

    # --- told by the supervisor ----------------------------------------------------------------------------

    def state_changed(self, state: State) -> None:
        """Show the state; outside of a start there is no phase."""
        self._state.state(state)
        if state is not State.STARTING:
            self._phase.state(NO_PHASE)

    def progressed(self, progress: Progress) -> None:
        """Show the phase."""
        self._phase.state(progress.phase)

    def became_ready(self, seconds: float) -> None:
        """Count from here on."""
        self.tally.mark_ready()
        self._starts.observe(seconds)

    def engine_gone(self) -> None:
        """Take the dead processes' counts into the totals."""
        self.tally.mark_gone()

    def restarting(self, cause: Cause) -> None:
        """Count a restart."""
        self._restarts.labels(cause).inc()

    def degraded(self, rung: Rung) -> None:
        """Show the rung."""
        self._rung.state(rung)

    def struck(self) -> None:
        """Count a strike of the watchdog."""
        self._strikes.inc()

    def rotated(self, folders: int) -> None:
        """Count caches that were put aside."""
        self._rotations.inc(folders)

    def orphans_ended(self, processes: int) -> None:
        """Count ended orphans."""
        self._orphans.inc(processes)

    # --- told by the proxy ---------------------------------------------------------------------------------

    def request_done(self, route: str, code: int, seconds: float) -> None:
        """Count a request; ``route`` is a pattern of the allow-list and never what the client sent."""
        self._requests.labels(route, str(code)).inc()
        self._seconds.labels(route).observe(seconds)

    def auth_failed(self, keys: str) -> None:
        """Count a request without a valid key."""
        self._auth_failures.labels(keys).inc()

    def queued(self) -> None:
        """Count a waiting request."""
        self._queue.inc()

    def dequeued(self, seconds: float) -> None:
        """Count it off."""
        self._queue.dec()
        self._waits.observe(seconds)

    def stream_opened(self) -> None:
        """Count an open stream."""
        self._streams.inc()

    def stream_closed(self) -> None:
        """Count it off."""
        self._streams.dec()


class _TallyCollector(Collector):
    """Shows the step counters at the moment of the scrape."""

    def __init__(self, tally: Tally, scrape_errors: Counter) -> None:
        self._tally = tally
        self._errors = scrape_errors.labels("counters")
        self._reported = 0

    def collect(self) -> Iterator[Metric]:
        totals = self._tally.totals()
        self._errors.inc(self._tally.errors - self._reported)
        self._reported = self._tally.errors
        yield _labelled(
            "mjolnir_t5_steps",
            "Attention group steps that ran on T5.",
            "kind",
            {kind: totals[f"t5:{kind}"] for kind in StepKind},
        )
        yield _labelled(
            "mjolnir_fallback_steps",
            "Attention group steps that ran on the fallback.",
            "reason",
            {reason: totals[f"fallback:{reason}"] for reason in FallbackReason},
        )
        yield CounterMetricFamily("mjolnir_t5_tokens", "Query tokens of the steps on T5.", value=totals[T5_TOKENS])
        yield CounterMetricFamily(
            "mjolnir_fallback_tokens", "Query tokens of the steps on the fallback.", value=totals[FALLBACK_TOKENS]
        )
        yield _labelled(
            "mjolnir_kernels",
            "T5 kernel variants, warm-up included.",
            "source",
            {source: totals[f"kernels:{source}"] for source in KernelSource},
        )
        yield self._groups()

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read files."""
        return iter(())

    def _groups(self) -> Metric:
        family = GaugeMetricFamily(
            "mjolnir_group_info",
            "Attention groups of the engine; reason is empty where T5 runs the decode steps.",
            labels=_GROUP_LABELS,
        )
        for group in self._tally.groups:
            family.add_metric([str(getattr(group, label)) for label in _GROUP_LABELS], 1)
        return family


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([str(value)], number)
    return family
