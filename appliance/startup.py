"""One start: from the engine's first process until it has answered a request."""

import asyncio
import logging
import math
import time
from collections.abc import Callable

import aiohttp

from appliance import faults, link, selftest
from appliance.engine import Engine
from appliance.faults import Fault, Stage
from appliance.headroom import Headroom
from appliance.phases import Phase, Progress, ProgressTracker
from appliance.processes import compilers
from appliance.selftest import Probe, SelfTestError
from appliance.settings import Settings

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_HEALTH_SECONDS = 5.0
_COMPILER_LOOK_SECONDS = 5.0
_DYING_SECONDS = 5.0  # an engine that closed the connection of the self-test is about to end


class Startup:
    """Follows one engine's start.

    Args:
        settings: of the engine.
        headroom: the machine's memory.
        session: with the engine's socket.
        moved_on: called when the progress has changed.

    Attributes:
        probe: a request that the engine answered, once it is ready.
    """

    def __init__(
        self,
        settings: Settings,
        headroom: Headroom,
        session: aiohttp.ClientSession,
        moved_on: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.probe: Probe | None = None
        self._settings = settings
        self._headroom = headroom
        self._session = session
        self._moved_on = moved_on
        self._tracker = ProgressTracker()
        self._moved = self._looked = time.monotonic()

    @property
    def progress(self) -> Progress:
        """Where the start is."""
        return self._tracker.progress

    def feed(self, line: str) -> None:
        """Take in a line of the engine's log."""
        before = self.progress
        if self._tracker.feed(line):
            self._moved = time.monotonic()
        if self.progress != before:
            self._moved_on(self.progress)

    async def until_ready(self, engine: Engine) -> Fault | None:
        """Wait until the engine has answered; else end it and say why."""
        exited = asyncio.ensure_future(engine.wait())
        answered = asyncio.ensure_future(self._answered())
        try:
            while True:
                waits = {exited, answered}
                await asyncio.wait(waits, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    return faults.of_exit(Stage.START, exited.result(), engine.log_since(math.inf))
                if answered.done():
                    error = answered.exception()
                    if error is not None and not isinstance(error, SelfTestError):
                        raise error
                    return None if error is None else await self._failed_test(engine, exited, error)
                fault = self._overdue(engine)
                if fault is not None:
                    engine.kill()
                    await engine.stop()
                    return fault
        finally:
            exited.cancel()
            answered.cancel()
            await asyncio.gather(answered, return_exceptions=True)

    async def _answered(self) -> None:
        while not await link.is_healthy(self._session, _HEALTH_SECONDS):  # noqa: ASYNC110  (asks another process)
            await asyncio.sleep(_POLL_SECONDS)
        if not self._settings.self_test:
            return
        self._tracker.progress = Progress(Phase.SELF_TEST)
        self._moved = time.monotonic()
        self._moved_on(self.progress)
        self.probe = await selftest.run(self._session)

    async def _failed_test(self, engine: Engine, exited: "asyncio.Future[int]", error: SelfTestError) -> Fault:
        if error.__cause__ is not None:
            await asyncio.wait({exited}, timeout=_DYING_SECONDS)
        if exited.done():
            return faults.of_exit(Stage.START, exited.result(), engine.log_since(math.inf))
        engine.kill()
        await engine.stop()
        return faults.of_self_test(str(error), engine.log_since(math.inf))

    def _overdue(self, engine: Engine) -> Fault | None:
        """Why the start has to be ended now, if it has to."""
        now = time.monotonic()
        available = self._headroom.below_floor()
        if available is not None:
            return faults.of_floor(self.progress, available, self._headroom.floor)
        if now - self._moved <= self._settings.start_timeout_seconds:
            return None
        if now - self._looked > min(_COMPILER_LOOK_SECONDS, self._settings.start_timeout_seconds):
            self._looked = now
            busy = compilers(engine.pid)
            if busy:  # a compiler is silent for minutes, and no hang
                log.info("the engine is silent while it compiles: %s", ", ".join(sorted(busy)))
                self._moved = now
                return None
        return faults.of_stall(self.progress, now - self._moved)
