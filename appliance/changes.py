"""Requests for another engine: one at a time, checked while the present one serves, with what came of the last."""

import asyncio
import logging
from collections.abc import Callable

from appliance import preflight
from appliance.errors import ApplianceError, EngineError
from appliance.headroom import Headroom
from appliance.target import Change, Switched, Target

log = logging.getLogger(__name__)


class Changes:
    """The change that is asked for or being tried.

    Args:
        note: told what came of each.
        root: folder that stands for ``/``.

    Attributes:
        wanted: set while a checked change waits to be carried out.
        last: what came of the last one.
    """

    def __init__(self, note: Callable[[str], None], root: str = "/") -> None:
        self.wanted = asyncio.Event()
        self.last: Switched | None = None
        self._note = note
        self._root = root
        self._current: Change | None = None
        self._task: asyncio.Task[None] | None = None

    def accept(self, change: Change) -> Change:
        """Take a change that needs no check.

        Raises:
            EngineError: another one is under way.
        """
        self._begin(change)
        self.wanted.set()
        return change

    def accept_checked(self, change: Change) -> Change:
        """Take a change once its settings and flags are seen to be usable.

        Raises:
            EngineError: another one is under way.
        """
        self._begin(change)
        self._task = asyncio.create_task(self._check(change), name="switch")
        return change

    def take(self) -> Change | None:
        """The change that is wanted, which is being tried from now on."""
        self.wanted.clear()
        return self._current

    def tried(self, target: Target) -> Change | None:
        """The change that is being tried with this target."""
        change = self._current
        return change if change is not None and change.target is target and not self.wanted.is_set() else None

    def finish(self, change: Change, *, done: bool, reason: str = "") -> None:
        """Tell what came of a change."""
        self._current = None
        self.last = change.ended(done=done, reason=reason)
        self._note(f"switched to {change}" if done else f"no switch to {change}: {reason}")

    def close(self) -> None:
        """The appliance has ended, and with it what was under way."""
        if self._task is not None:
            self._task.cancel()
        if self._current is not None:
            self.finish(self._current, done=False, reason="the appliance ended")

    def _begin(self, change: Change) -> None:
        if self._current is not None:
            raise EngineError(f"a change to {self._current} is under way")
        self._current = change

    async def _check(self, change: Change) -> None:
        target = change.target
        try:
            weights = await asyncio.to_thread(preflight.check_settings, target.settings)
            Headroom(target.settings, self._root).check_total(weights)
            await preflight.check_flags(target.settings, target.launch)
        except ApplianceError as error:
            self.finish(change, done=False, reason=str(error))
        except Exception as error:  # a bug of ours must not refuse every later change
            log.exception("the settings of %s could not be checked", change)
            self.finish(change, done=False, reason=repr(error))
        else:
            self.wanted.set()
