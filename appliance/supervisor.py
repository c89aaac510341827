"""The one task that owns the engine: it checks, starts, watches, restarts and ends it; everything else asks it."""

import asyncio
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp

from appliance import command, faults, openai_error, preflight
from appliance.engine import Engine
from appliance.errors import ApplianceError, EngineError
from appliance.faults import Cause, Fault
from appliance.lifecycle import Event, State, advance
from appliance.log import ENGINE, Redactor, level_of
from appliance.openai_error import ApiError
from appliance.phases import Progress, ProgressTracker
from appliance.proxy import engine_session
from appliance.settings import Settings
from appliance.watcher import Watcher

log = logging.getLogger(__name__)
engine_log = logging.getLogger(ENGINE)

T = TypeVar("T")

_HEALTH_POLL_SECONDS = 0.1
_HEALTH_TIMEOUT_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 5  # what a client is told while the engine starts
_DYING_SECONDS = 30.0  # an engine that was serving: its cause of death is in the log's last lines


@dataclass(frozen=True)
class Status:
    """What the supervisor says about itself at one moment."""

    state: State
    progress: Progress | None
    fault: Fault | None
    restarts: int
    failed_starts: int
    ready_seconds: float | None
    log_tail: list[str] = field(default_factory=list)


class _StopRequested(Exception):  # noqa: N818  (control flow)
    """The appliance was asked to end."""


class Supervisor:
    """Runs one engine until it is told to stop or the engine can't be kept up.

    ``run`` is the owner; ``stop``, ``status`` and the proxy's ``admit`` may be called from any other task of the
    same event loop.
    """

    def __init__(
        self,
        settings: Settings,
        inherited: dict[str, str],
        watchers: Sequence[Watcher] = (),
        redactor: Redactor | None = None,
    ) -> None:
        self._settings = settings
        self._redactor = redactor or Redactor(())
        self._watchers = list(watchers)
        self.stats_dir = self.stats_dir_of(settings)
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="mjolnir-"))
        self._launch = command.build(settings, inherited, self._runtime_dir, self.stats_dir)
        self._state = State.PREFLIGHT
        self._engine: Engine | None = None
        self._tracker = ProgressTracker()
        self._moved = time.monotonic()
        self._fault: Fault | None = None
        self._restarts = 0
        self._failed_starts = 0
        self._was_ready = False
        self._ready_since: float | None = None
        self._resume_at = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    @staticmethod
    def stats_dir_of(settings: Settings) -> Path:
        """Folder of the counters files of this process's engines."""
        return settings.stats_dir / str(os.getpid())

    # --- what others may ask -------------------------------------------------------------------------------

    @property
    def socket(self) -> Path:
        """Unix socket of the engine."""
        return self._launch.socket

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def engine_pid(self) -> int | None:
        """Root of the engine's processes."""
        return self._engine.pid if self._engine else None

    def status(self, lines: int = 50) -> Status:
        """The present state with all that led to it."""
        return Status(
            state=self._state,
            progress=self._tracker.progress if self._state is State.STARTING else None,
            fault=self._fault,
            restarts=self._restarts,
            failed_starts=self._failed_starts,
            ready_seconds=None if self._ready_since is None else time.monotonic() - self._ready_since,
            log_tail=self._engine.tail(lines) if self._engine else [],
        )

    def stop(self) -> None:
        """Ask for the end: the first time streams may finish, the second time everything ends at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def tell(self, watcher: Watcher) -> None:
        """Tell one more watcher what happens from now on."""
        self._watchers.append(watcher)

    def session_if_ready(self) -> aiohttp.ClientSession | None:
        """A session with the engine when it takes requests."""
        return self._session if self._state is State.READY else None

    def admit(self) -> aiohttp.ClientSession | ApiError:
        """A session with the engine when it takes requests, else the answer for the client."""
        session = self.session_if_ready()
        if session is not None:
            return session
        wait = _RETRY_AFTER_SECONDS
        if self._state is State.BACKOFF:
            wait += max(0, math.ceil(self._resume_at - time.monotonic()))
        return openai_error.not_ready(self._state, wait)

    def entered(self) -> None:
        """A request has been admitted."""
        self._in_flight += 1
        self._idle.clear()

    def left(self) -> None:
        """An admitted request is done with."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    # --- the owner -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until ``stop``.

        Raises:
            ApplianceError: the engine can't be started, or not be kept up; its last word in one line.
        """
        self.stats_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            async with engine_session(str(self._launch.socket)) as self._session:
                await self._run()
        finally:
            if self._engine is not None:  # only if a bug or a cancellation ended _run early
                self._engine.kill()
                await self._engine.stop()
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
            shutil.rmtree(self.stats_dir, ignore_errors=True)

    async def _run(self) -> None:
        self._tell(lambda watcher: watcher.state_changed(self._state))
        try:
            while True:
                self._fault = await self._attempt()
                await self._recover(self._fault)
        except _StopRequested:
            await self._drain()

    async def _attempt(self) -> Fault:
        """One engine from preflight to its loss; what ended it is the result."""
        try:
            await self._unless_stopped(self._preflight())
        except ApplianceError as error:
            return self._lost(Fault(Cause.PREFLIGHT, str(error), not self._was_ready, error.exit_code))
        self._advance(Event.CHECKED)
        started = time.monotonic()
        self._tracker, self._moved = ProgressTracker(), started
        self._tell(lambda watcher: watcher.progressed(self._tracker.progress))
        engine = Engine(self._launch, self._settings.stop_seconds, self._on_line, self._redactor)
        try:
            await engine.start()
        except EngineError as error:
            return self._lost(Fault(Cause.START_FAILED, str(error)))
        self._engine = engine
        fault = await self._unless_stopped(self._until_ready(engine))
        if fault is not None:
            return self._lost(fault)
        self._on_ready(time.monotonic() - started)
        code = await self._unless_stopped(engine.wait())
        return self._lost(faults.of_exit(Cause.EXITED, code, engine.log_since(_DYING_SECONDS)))

    async def _preflight(self) -> None:
        if self._was_ready or self._failed_starts:
            await asyncio.to_thread(preflight.check_settings, self._settings)
        await preflight.check_flags(self._settings, self._launch)

    async def _until_ready(self, engine: Engine) -> Fault | None:
        """Wait for the engine's first healthy answer; None when it came."""
        exited = asyncio.ensure_future(engine.wait())
        try:
            while not await self._healthy():
                silent = time.monotonic() - self._moved
                if silent > self._settings.start_timeout_seconds:
                    await engine.stop()
                    return faults.of_stall(self._tracker.progress, silent)
                await asyncio.wait({exited}, timeout=_HEALTH_POLL_SECONDS)
                if exited.done():
                    return faults.of_exit(Cause.START_FAILED, exited.result(), engine.tail(10_000))
            return None
        finally:
            exited.cancel()

    async def _healthy(self) -> bool:
        if self._session is None or not self._launch.socket.exists():
            return False
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_SECONDS)
        try:
            async with self._session.get("http://engine/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _recover(self, fault: Fault) -> None:
        """Pause before the next start, or give up."""
        log.error("%s: %s", fault.cause, fault.text)
        if fault.cause is not Cause.EXITED:
            self._failed_starts += 1
        hopeless = fault.settings and not self._was_ready
        if hopeless or self._failed_starts >= self._settings.restart_limit:
            self._advance(Event.GIVE_UP)
            raise fault.last_word(self._failed_starts)
        settings = self._settings
        pause = faults.pause_before_start(settings.backoff_seconds, settings.backoff_cap_seconds, self._failed_starts)
        self._restarts += 1
        self._resume_at = time.monotonic() + pause
        self._tell(lambda watcher: watcher.restarting(fault.cause))
        self._advance(Event.RETRY)
        log.info("next start in %.1f s", pause)
        await self._unless_stopped(asyncio.sleep(pause))
        self._advance(Event.ELAPSED)

    async def _drain(self) -> None:
        """Let no request in, give those inside time to finish, end the engine."""
        self._advance(Event.STOP)
        self._ready_since = None
        if self._in_flight:
            log.info("waiting up to %g s for %d requests", self._settings.drain_seconds, self._in_flight)
            await _first_of(self._idle.wait(), self._hurry.wait(), asyncio.sleep(self._settings.drain_seconds))
        if self._engine is not None:
            await asyncio.gather(self._engine.stop(), self._kill_when_hurried(self._engine))
            self._gone()
        self._advance(Event.EMPTY)

    async def _kill_when_hurried(self, engine: Engine) -> None:
        await _first_of(engine.wait(), self._hurry.wait())
        if self._hurry.is_set():
            engine.kill()

    # --- small steps ---------------------------------------------------------------------------------------

    def _on_line(self, line: str) -> None:
        engine_log.log(level_of(line), "%s", line)
        before = self._tracker.progress
        if self._tracker.feed(line):
            self._moved = time.monotonic()
        if self._tracker.progress != before and self._state is State.STARTING:
            self._tell(lambda watcher: watcher.progressed(self._tracker.progress))

    def _on_ready(self, seconds: float) -> None:
        self._failed_starts = 0
        self._was_ready = True
        self._ready_since = time.monotonic()
        self._tell(lambda watcher: watcher.became_ready(seconds))
        self._advance(Event.ANSWERED)

    def _lost(self, fault: Fault) -> Fault:
        self._ready_since = None
        self._gone()
        self._advance(Event.FAULT)
        return fault

    def _gone(self) -> None:
        if self._engine is not None:
            self._tell(lambda watcher: watcher.engine_gone())

    def _advance(self, event: Event) -> None:
        before, self._state = self._state, advance(self._state, event)
        log.info("%s -> %s", before, self._state)
        self._tell(lambda watcher: watcher.state_changed(self._state))

    def _tell(self, call: Callable[[Watcher], None]) -> None:
        for watcher in self._watchers:
            call(watcher)

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """The result of ``work``, which is given up as soon as the appliance is asked to end."""
        task = asyncio.ensure_future(work)
        await _first_of(task, self._stop.wait())
        if task.cancelled():
            raise _StopRequested
        return task.result()


async def _first_of(*works: Awaitable[object]) -> None:
    """Wait until one of several is done, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
