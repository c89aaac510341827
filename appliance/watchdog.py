"""Is a ready engine alive? Asked of its processes at once, and of its progress in strikes.

``/health`` stays 200 with a frozen engine, so it is not asked. Progress is a scheduler iteration, a token, or a step
in our own counters. A look that finds none while requests run is a strike, and so is a ``/metrics`` that does not
answer; three in a row are a hang. The three looks spread over ``hang_seconds``, which has to be longer than the
longest prefill step or compilation in the engine's own process; compilers that it starts excuse it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from appliance import faults, link, selftest
from appliance.engine import Engine, ended
from appliance.faults import Fault, Stage
from appliance.processes import compilers, descendants, title
from appliance.selftest import Probe
from mjolnir.counters import Snapshot, read_all

log = logging.getLogger(__name__)

STRIKES = 3
TITLE = "VLLM::"
_PROGRESS = frozenset(
    (
        *("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        *("vllm:request_success_total",),
    )
)
_LOAD = frozenset(("vllm:num_requests_running", "vllm:num_requests_waiting"))
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)
_ANSWER_SECONDS = 10.0
_DYING_SECONDS = 30.0  # the cause of death of an engine that was serving is in its log's last lines


@dataclass(frozen=True)
class Look:
    """What one look at the engine showed.

    Attributes:
        answered: its metrics came.
        progress: a sum that only grows while it works.
        requests: that it says it runs or keeps waiting.
    """

    answered: bool
    progress: float = 0.0
    requests: float = 0.0


class Strikes:
    """Counts looks without progress. Pure."""

    def __init__(self, first: Look) -> None:
        self._last = first
        self.count = 0
        self.why = ""

    def judge(self, look: Look, in_flight: int) -> bool:
        """Take in a look.

        Returns:
            Whether only a probe can tell: the engine knows of no request and a client waits for one. It may be the
            client that does not read, or an engine that no longer takes anything in.
        """
        moved = look.progress != self._last.progress
        if look.answered:
            self._last = look
        if not look.answered:
            self._strike("its metrics do not answer")
        elif moved:
            self.clear()
        elif look.requests:
            self._strike(f"{look.requests:g} requests and no step")
        elif in_flight:
            return True
        else:
            self.clear()
        return False

    def probed(self, answered: bool) -> None:
        """What a probe has shown."""
        if answered:
            self.clear()
        else:
            self._strike("a request of one token was not answered")

    def clear(self) -> None:
        """All is well."""
        self.count = 0

    def _strike(self, why: str) -> None:
        self.count += 1
        self.why = why


class Watchdog:
    """Watches one ready engine.

    Args:
        session: with the engine.
        stats_dir: folder of its counters files.
        hang_seconds: over which three strikes are a hang.
        in_flight: tells how many clients' requests are in the engine.
        probe: a request that it has answered before; None where it generates no text.
        on_strike: called at each strike.
        on_lost: called once the engine is lost, before its processes are ended.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        stats_dir: Path,
        hang_seconds: float,
        in_flight: Callable[[], int],
        probe: Probe | None,
        on_strike: Callable[[str], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._stats_dir = stats_dir
        self._period = hang_seconds / STRIKES
        self._patience = min(_ANSWER_SECONDS, self._period)
        self._in_flight = in_flight
        self._probe = probe
        self._on_strike = on_strike
        self._on_lost = on_lost

    async def watch(self, engine: Engine) -> Fault:
        """Return when the engine is lost, with all of its processes ended."""
        main, parts = await asyncio.to_thread(_processes, engine.pid)
        gone = {asyncio.ensure_future(ended(pid)): name for pid, name in parts.items()}
        exited = asyncio.ensure_future(engine.wait())
        main_gone = asyncio.ensure_future(ended(main)) if main is not None else exited
        hung = asyncio.ensure_future(self._hung(engine))
        works: set[asyncio.Future[object]] = {*gone, exited, main_gone, hung}  # type: ignore[arg-type]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            self._on_lost()
            if main_gone.done() or exited.done():
                return faults.of_exit(Stage.READY, await engine.wait(), engine.log_since(_DYING_SECONDS))
            engine.kill()
            await engine.stop()
            if hung.done():
                return hung.result()
            name = next(name for work, name in gone.items() if work.done())
            return faults.of_log(Stage.READY, f"the engine's process {name} ended", engine.log_since(_DYING_SECONDS))
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _hung(self, engine: Engine) -> Fault:
        """Return when the engine hangs."""
        strikes = Strikes(await self._look())
        began = time.monotonic()
        while strikes.count < STRIKES:
            await asyncio.sleep(self._period)
            before = strikes.count
            if strikes.judge(await self._look(), self._in_flight()) and self._probe is not None:
                strikes.probed(await selftest.answers(self._session, self._probe, max(self._patience, self._period)))
            if strikes.count and (busy := await asyncio.to_thread(compilers, engine.pid)):
                log.info("no progress while the engine compiles: %s", ", ".join(sorted(busy)))
                strikes.clear()
            if strikes.count == 0:
                began = time.monotonic()
            elif strikes.count > before:
                log.warning("no progress, strike %d of %d: %s", strikes.count, STRIKES, strikes.why)
                self._on_strike(strikes.why)
        return faults.of_hang(STRIKES, time.monotonic() - began, strikes.why)

    async def _look(self) -> Look:
        page = await link.metrics_page(self._session, self._patience)
        steps = await asyncio.to_thread(_steps, self._stats_dir)
        return Look(False) if page is None else look_at(page, steps)


def look_at(page: str, steps: int) -> Look:
    """A look out of a metrics page and our own counters' sum. Pure."""
    progress, requests = float(steps), 0.0
    for name, value in _SAMPLE.findall(page):
        try:
            if name in _PROGRESS:
                progress += float(value)
            elif name in _LOAD:
                requests += float(value)
        except ValueError:
            continue
    return Look(True, progress, requests)


def _steps(stats_dir: Path) -> int:
    return sum(sum(found.counters.values()) for _, found in read_all(stats_dir) if isinstance(found, Snapshot))


def _processes(root: int) -> tuple[int | None, dict[int, str]]:
    """The engine's main process, and by id those of the others that bear vLLM's titles. Blocks."""
    below = descendants(root)
    titles = {pid: title(pid) for pid in below[1:]}
    return (below[0] if below else None), {
        pid: text.split()[0] for pid, text in titles.items() if text.startswith(TITLE)
    }
