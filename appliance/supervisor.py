"""The one task that owns the engine: it checks, starts, watches, restarts and ends it; everything else asks it."""

import asyncio
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from appliance import caches, faults, openai_error, orphans, preflight
from appliance.changes import Changes
from appliance.engine import Engine
from appliance.engine_client import EngineClient
from appliance.errors import ApplianceError, EngineError
from appliance.faults import Fault, Stage
from appliance.headroom import Headroom
from appliance.inside import Inside
from appliance.instance import sole_user
from appliance.journal import Audience
from appliance.ladder import Rung
from appliance.lifecycle import Event, State, advance
from appliance.link import engine_link
from appliance.log import Redactor
from appliance.openai_error import ApiError
from appliance.phases import Progress
from appliance.policy import Action, Decision
from appliance.settings import Settings
from appliance.startup import Startup
from appliance.target import Change, Status, Switched, Target, target_of
from appliance.waiting import first_of
from appliance.watchdog import Watchdog
from appliance.watcher import Watcher

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_AFTER_SECONDS = 5  # what a client is told while the engine starts
_ENDED = (State.DRAINING, State.STOPPED)


class _Interrupted(Exception):  # noqa: N818  (control flow)
    """The appliance was asked to end, or to run another engine."""


class Supervisor:
    """Runs one engine until it is told to stop or the engine can't be kept up.

    ``run`` is the owner; ``stop``, ``request_switch``, ``request_restore``, ``status``, ``tell`` (one more watcher) and
    the proxy's ``admit``, ``entered`` and ``left`` may be called from any other task of the same event loop.
    """

    def __init__(
        self,
        settings: Settings,
        inherited: dict[str, str],
        watchers: Sequence[Watcher] = (),
        redactor: Redactor | None = None,
        root: str = "/",
    ) -> None:
        self._inherited = inherited
        self._redactor = redactor or Redactor()
        self._audience = Audience(watchers)
        self.tell, self._tell, self._note = self._audience.join, self._audience.tell, self._audience.note
        self._root = root
        self.stats_dir = self.stats_dir_of(settings)
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="mjolnir-"))
        self._target = self._target_of("", settings)
        self._state = State.PREFLIGHT
        self._engine: Engine | None = None
        self._startup: Startup | None = None
        self._fault: Fault | None = None
        self._restarts = 0
        self._ready_since: float | None = None
        self._served = 0.0  # seconds that the last engine had been ready
        self._resume_at = 0.0
        self._client = EngineClient(str(self.socket))
        self._session: aiohttp.ClientSession | None = None
        self._inside = Inside()
        self.entered, self.left = self._inside.enter, self._inside.leave
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._changes = Changes(lambda text: self._note(text, level=logging.WARNING), root)

    @staticmethod
    def stats_dir_of(settings: Settings) -> Path:
        """Folder of the counters files of this process's engines."""
        return settings.stats_dir.absolute() / str(os.getpid())

    # --- what others may ask -------------------------------------------------------------------------------

    @property
    def socket(self) -> Path:
        """Unix socket of the engine."""
        return self._target.launch.socket

    @property
    def settings(self) -> Settings:
        """Settings of the engine that runs or is being started."""
        return self._target.settings

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
        startup = self._startup if self._state is State.STARTING else None
        return Status(
            state=self._state,
            progress=startup.progress if startup else None,
            fault=self._fault,
            restarts=self._restarts,
            failed_starts=self._target.history.failed_starts,
            ready_seconds=None if self._ready_since is None else time.monotonic() - self._ready_since,
            rung=self._target.ladder.rung,
            switched=self._changes.last,
            events=self._audience.journal.events,
            log_tail=self._engine.tail(lines) if self._engine else [],
        )

    def stop(self) -> None:
        """Ask for the end: the first time streams may finish, the second time everything ends at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def request_switch(self, name: str, settings: Settings) -> "asyncio.Future[Switched]":
        """Ask for another engine: it is checked, streams may finish, then it takes the present one's place.

        When it does not get ready at its first start, the present one is started again.

        Args:
            name: of the profile, for status and events.
            settings: of the new engine. Settings of the appliance itself (address, keys, folders) stay as they are.

        Returns:
            What came of it; it need not be awaited.

        Raises:
            EngineError: another change is under way, or the appliance ends.
        """
        self._refuse_at_the_end()
        return self._changes.accept_checked(Change(self._target_of(name, settings), self._target)).outcome

    def request_restore(self) -> "asyncio.Future[Switched]":
        """Ask for a restart of the engine at the top of the degrade ladder.

        Raises:
            EngineError: nothing is given up, another change is under way, or the appliance ends.
        """
        if self._target.ladder.rung is Rung.FULL:
            raise EngineError("there is nothing to restore: the engine runs at the top of its ladder")
        self._refuse_at_the_end()
        return self._changes.accept(Change(self._target, None)).outcome

    def session_if_ready(self) -> aiohttp.ClientSession | None:
        """A session with the engine when it takes requests."""
        return self._session if self._takes_requests else None

    def admit(self) -> EngineClient | ApiError:
        """A client of the engine when it takes requests, else the answer for the client."""
        if self._takes_requests:
            return self._client
        wait = _RETRY_AFTER_SECONDS
        if self._state is State.BACKOFF:
            wait += max(0, math.ceil(self._resume_at - time.monotonic()))
        return openai_error.not_ready(self._state, wait)

    # --- the owner -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running until ``stop``.

        Raises:
            ApplianceError: the engine can't be started, or not be kept up; its last word in one line.
        """
        try:
            with sole_user(self.stats_dir.parent):
                self.stats_dir.mkdir(mode=0o700, exist_ok=True)
                async with engine_link(str(self.socket)) as self._session:
                    await self._run()
        finally:
            self._client.close()
            if self._engine is not None:  # only if a bug or a cancellation ended _run early
                self._engine.kill()
                await self._engine.stop()
            self._changes.close()
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
            shutil.rmtree(self.stats_dir, ignore_errors=True)

    async def _run(self) -> None:
        preflight.warn_of_shared_memory()
        self._tell(lambda watcher: watcher.state_changed(self._state))
        while True:
            try:
                self._fault = await self._attempt()
                await self._recover(self._fault)
            except _Interrupted:
                if self._stop.is_set():
                    self._advance(Event.STOP)
                    break
                await self._make_way()
                if self._state is State.DRAINING:
                    break
        await self._empty()
        self._advance(Event.EMPTY)

    async def _attempt(self) -> Fault:
        """One engine from preflight to its loss; what ended it is the result."""
        target = self._target
        headroom = Headroom(target.settings, self._root)
        try:
            await self._uninterrupted(self._preflight(target, headroom))
        except ApplianceError as error:
            return self._lost(faults.of_check(error))
        self._advance(Event.CHECKED)
        started = time.monotonic()
        self._served = 0.0
        startup = self._startup = Startup(target.settings, headroom, self._link, self._progressed)
        self._progressed(startup.progress)
        launch = target.ladder.applied_to(target.launch)
        engine = Engine(launch, target.settings.stop_seconds, startup.feed, self._redactor)
        try:
            await engine.start()
        except EngineError as error:
            return self._lost(faults.of_check(error))
        self._engine = engine
        fault = await self._uninterrupted(startup.until_ready(engine))
        if fault is not None:
            return self._lost(fault)
        self._on_ready(time.monotonic() - started)
        watchdog = Watchdog(
            self._link,
            self.stats_dir,
            target.settings.hang_seconds,
            lambda: self._inside.count,
            startup.probe,
            lambda why: self._note(f"no progress: {why}", lambda watcher: watcher.struck()),
            self._close,
        )
        return self._lost(await self._uninterrupted(watchdog.watch(engine)))

    async def _preflight(self, target: Target, headroom: Headroom) -> None:
        found = await asyncio.to_thread(orphans.end_all, self.stats_dir.parent)
        if found:
            told = f"ended what a dead appliance had left: {', '.join(map(str, found))}"
            self._note(told, lambda watcher: watcher.orphans_ended(len(found)))
        headroom.check(await asyncio.to_thread(preflight.check_settings, target.settings))
        await preflight.check_flags(target.settings, target.launch)

    async def _recover(self, fault: Fault) -> None:
        """Do what the fault's policy says and pause before the next start, or give up."""
        log.error("%s: %s", fault.cause, fault.text, extra={"cause": fault.cause})
        self._tell(lambda watcher: watcher.noted(f"{fault.cause}: {fault.text}"))
        tried = self._changes.tried(self._target)
        failed = tried is not None and fault.stage is Stage.START
        decision = self._return(tried, fault) if tried is not None and failed else self._decide(fault)
        if decision.action is Action.STOP:
            self._advance(Event.GIVE_UP)
            raise fault.last_word(decision.reason)
        self._restarts += 1
        self._resume_at = time.monotonic() + decision.pause
        self._tell(lambda watcher: watcher.restarting(fault.cause))
        self._advance(Event.RETRY)
        log.info("next start in %.1f s", decision.pause)
        await self._uninterrupted(self._pause(decision))
        self._advance(Event.ELAPSED)

    def _decide(self, fault: Fault) -> Decision:
        target = self._target
        decision = target.history.lost(
            fault,
            self._served,
            can_degrade=target.ladder.below is not None,
            can_rotate=bool(caches.folders(target.launch.environment)),
        )
        if decision.action is Action.DEGRADE:
            rung = target.ladder.descend()
            told = f"degraded to {rung} after {fault.cause}; POST /admin/restore climbs back"
            self._note(told, lambda watcher: watcher.degraded(rung), logging.WARNING)
        return decision

    async def _pause(self, decision: Decision) -> None:
        await asyncio.gather(asyncio.sleep(decision.pause), self._settle())
        if decision.action is Action.ROTATE:
            done = await asyncio.to_thread(caches.rotate, self._target.launch.environment)
            told = f"compile caches put aside: {', '.join(map(str, done)) or 'none'}"
            self._note(told, lambda watcher: watcher.rotated(len(done)), logging.WARNING)

    # --- another engine ------------------------------------------------------------------------------------

    def _refuse_at_the_end(self) -> None:
        if self._stop.is_set() or self._state in _ENDED:
            raise EngineError("the appliance ends")

    async def _make_way(self) -> None:
        """End the present engine and put the wanted one in its place; or begin to stop, if that is asked meanwhile."""
        change = self._changes.take()
        self._advance(Event.SWITCH)
        await self._empty()
        await first_of(self._settle(), self._stop.wait())
        if self._stop.is_set() or change is None:  # without one nothing was wanted
            self._advance(Event.STOP)
            return
        change.target.ladder.restore()
        self._target = change.target
        self._note(f"switching to {change}" if change.previous else "back to the top of the ladder")
        self._tell(lambda watcher: watcher.degraded(Rung.FULL))
        self._advance(Event.EMPTY)

    def _return(self, change: Change, fault: Fault) -> Decision:
        """The new engine did not get ready: back to the one from before."""
        self._changes.finish(change, done=False, reason=f"{fault.cause}: {fault.text}")
        if change.previous is None:
            return self._decide(fault)
        self._target = change.previous
        self._tell(lambda watcher: watcher.degraded(self._target.ladder.rung))
        return Decision(Action.RETRY)

    async def _settle(self) -> None:
        await Headroom(self.settings, self._root).settle(self.settings.settle_seconds)

    async def _empty(self) -> None:
        """Give the requests inside time to finish, then end the engine. Nothing is let in by the state."""
        self._ready_since = None
        patience = self.settings.drain_seconds
        if self._inside.count:
            log.info("waiting up to %g s for %d requests", patience, self._inside.count)
            await first_of(self._inside.none(), self._hurry.wait(), asyncio.sleep(patience))
        if self._engine is not None:
            await self._engine.stop(self._hurry)
            self._gone()

    # --- small steps ---------------------------------------------------------------------------------------

    def _target_of(self, name: str, settings: Settings) -> Target:
        return target_of(name, settings, self._inherited, self._runtime_dir, self.stats_dir)

    @property
    def _takes_requests(self) -> bool:
        return self._state is State.READY and self._ready_since is not None

    @property
    def _link(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineError("the supervisor does not run")
        return self._session

    def _progressed(self, progress: Progress) -> None:
        if self._state is State.STARTING:
            self._tell(lambda watcher: watcher.progressed(progress))

    def _on_ready(self, seconds: float) -> None:
        self._target.history.became_ready()
        self._ready_since, self._served = time.monotonic(), 0.0
        self._tell(lambda watcher: watcher.became_ready(seconds))
        self._advance(Event.ANSWERED)
        if (tried := self._changes.tried(self._target)) is not None:
            self._changes.finish(tried, done=True)

    def _close(self) -> None:
        """Let nobody in any more: the engine is lost, though its processes may take a while to end."""
        self._served = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
        self._ready_since = None

    def _lost(self, fault: Fault) -> Fault:
        self._gone()
        self._advance(Event.FAULT)
        return fault

    def _gone(self) -> None:
        self._client.close()
        if self._engine is not None:
            self._tell(lambda watcher: watcher.engine_gone())

    def _advance(self, event: Event) -> None:
        before, self._state = self._state, advance(self._state, event)
        log.info("%s -> %s", before, self._state, extra={"state": self._state})
        self._tell(lambda watcher: watcher.state_changed(self._state))

    async def _uninterrupted(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is given up as soon as the appliance is asked for something else."""
        task = asyncio.ensure_future(work)
        await first_of(task, self._stop.wait(), self._changes.wanted.wait())
        if task.cancelled():
            raise _Interrupted
        return task.result()
