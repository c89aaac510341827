"""Carries out the plan: each action of ``plan.TABLE`` on Docker's daemon, with the journal written before each.

Every action looks before it acts, so that doing it a second time does nothing. Containers are known by id: names
are what is being changed.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.host.errors import HostError, JournalError, UpgradeError
from appliance.host.facts import Daemon, Image
from appliance.host.journal import Journal, Record
from appliance.host.plan import ENDS, REVERSIBLE, TABLE, Action, Operation, State, resumed
from appliance.host.readiness import Waiter
from appliance.host.spec import Spec

# Told of each action before it begins, and of what it is waiting for.
Report = Callable[[Action, str], None]

_LOG_LINES = 200


@dataclass(frozen=True)
class Names:
    """The names that containers of one appliance have."""

    current: str

    @property
    def next(self) -> str:
        """Not yet serving."""
        return f"{self.current}-next"

    @property
    def old(self) -> str:
        """Serving no longer, kept until the new one is ready."""
        return f"{self.current}-old"

    @property
    def previous(self) -> str:
        """What a rollback goes back to."""
        return f"{self.current}-previous"

    @property
    def trial(self) -> str:
        """The new image's self-test."""
        return f"{self.current}-selftest"


class Switch:
    """Takes one container's place by another, in steps that survive being cut off."""

    def __init__(
        self, daemon: Daemon, journal: Journal, names: Names, waiter: Waiter, stop_seconds: int, report: Report
    ) -> None:
        self._daemon = daemon
        self._journal = journal
        self._names = names
        self._waiter = waiter
        self._stop_seconds = stop_seconds
        self._report = report
        self._make: tuple[Image, Spec] | None = None

    def upgrade(self, image: Image, spec: Spec) -> Record:
        """Have a new container of this image take over; returns how it ended, ``DONE`` or ``UNDONE``.

        Raises:
            HostError: neither could be reached; the next command goes on from there.
        """
        self._make = (image, spec)
        old = self._daemon.find(self._names.current)
        return self._run(
            Record(
                Operation.UPGRADE,
                State.PLANNED,
                old=old.id if old else "",
                image=image.name,
                was_running=bool(old and old.running),
            )
        )

    def rollback(self) -> Record:
        """Have the previous container take over again; returns how it ended.

        Raises:
            UpgradeError: there is no previous container.
            HostError: as with ``upgrade``.
        """
        previous, old = self._daemon.find(self._names.previous), self._daemon.find(self._names.current)
        if previous is None:
            raise UpgradeError(
                f"there is no container {self._names.previous} to go back to; `mjolnir upgrade` makes one"
            )
        return self._run(
            Record(
                Operation.ROLLBACK,
                State.PLANNED,
                old=old.id if old else "",
                new=previous.id,
                image=previous.image,
                was_running=bool(old and old.running),
            )
        )

    def resume(self, *, back: bool = False) -> Record | None:
        """Finish or undo what was interrupted; None if nothing was.

        Args:
            back: rather undo, where both are possible.

        Raises:
            HostError: it could not be brought to an end.
        """
        record = self._journal.read()
        if record is None or not record.pending:
            return None
        state = resumed(record.state, back=back)
        if state is State.FAILED and record.state is not State.FAILED:
            record = replace(record, reason="it was interrupted")
        return self._run(replace(record, state=state))

    def _run(self, record: Record) -> Record:
        while record.state not in ENDS:
            self._journal.write(record)
            action, after = TABLE[record.state]
            self._report(action, "")
            try:
                record = replace(self._act(action, record), state=after)
            except JournalError:
                raise
            except HostError as error:
                if record.state not in REVERSIBLE:
                    raise
                record = replace(record, state=State.FAILED, reason=str(error))
        self._journal.write(record)
        return record

    def _act(self, action: Action, record: Record) -> Record:
        match action:
            case Action.OBTAIN_NEW:
                return self._obtain(record)
            case Action.STOP_OLD:
                self._stop(record.old)
            case Action.SET_OLD_ASIDE:
                self._rename(record.old, self._names.old)
            case Action.PROMOTE_NEW:
                self._rename(record.new, self._names.current)
            case Action.START_NEW:
                self._daemon.start(record.new)
            case Action.AWAIT_NEW:
                self._waiter.wait(self._daemon, record.new, lambda words: self._report(action, words))
            case Action.DROP_PREVIOUS:
                self._drop_previous(record)
            case Action.KEEP_OLD:
                self._rename(record.old, self._names.previous)
            case _:
                return self._act_back(action, record)
        return record

    def _act_back(self, action: Action, record: Record) -> Record:
        match action:
            case Action.STOP_NEW:
                self._stop(record.new)
            case Action.DISCARD_NEW:
                self._discard(record)
            case Action.RESTORE_OLD:
                self._rename(record.old, self._names.current)
            case Action.RESTART_OLD if record.old and record.was_running:
                self._daemon.start(record.old)
            case Action.AWAIT_OLD if record.old and record.was_running:
                return self._await_old(action, record)
        return record

    def _await_old(self, action: Action, record: Record) -> Record:
        """The end of the way back: an old version that is broken too is told, not waited for again."""
        try:
            self._waiter.wait(self._daemon, record.old, lambda words: self._report(action, words))
        except UpgradeError as error:
            return replace(record, reason=f"{record.reason}; and the old container: {error}")
        return record

    def _obtain(self, record: Record) -> Record:
        """The new container under its first name: created, or the previous one."""
        if record.operation is Operation.ROLLBACK:
            self._rename(record.new, self._names.next)
            return record
        assert self._make is not None, "an interrupted creation is undone, never repeated"  # noqa: S101
        self._daemon.remove(self._names.next)  # of a change whose journal was lost
        return replace(record, new=self._daemon.create(self._names.next, *self._make))

    def _stop(self, container: str) -> None:
        facts = self._daemon.find(container) if container else None
        if facts is not None and facts.running:
            self._daemon.stop(container, self._stop_seconds)

    def _rename(self, container: str, name: str) -> None:
        if not container:
            return
        facts = self._daemon.find(container)
        if facts is None:
            raise UpgradeError(f"container {container[:12]} is gone; look at `docker ps -a`")
        if facts.name != name:
            self._daemon.rename(container, name)

    def _drop_previous(self, record: Record) -> None:
        previous = self._daemon.find(self._names.previous)
        if previous is not None and record.old and previous.id not in (record.old, record.new):
            self._daemon.remove(previous.id)

    def _discard(self, record: Record) -> None:
        """A created container goes, after its last words were kept; the previous one gets its name back."""
        if record.operation is Operation.ROLLBACK:
            self._rename(record.new, self._names.previous)
            return
        # A creation whose id was never written down left only a name.
        left = self._daemon.find(record.new or self._names.next)
        if left is not None:
            self._keep_log(left.id)
            self._daemon.remove(left.id)

    def _keep_log(self, container: str) -> None:
        """What a failed version said, for whoever looks for the cause; losing it must not stop the way back."""
        with contextlib.suppress(HostError, OSError):
            lines = b"".join(self._daemon.logs(container, _LOG_LINES))
            failed_log(self._journal, self._names).write_bytes(lines)


def failed_log(journal: Journal, names: Names) -> Path:
    """File with the last lines of the version that failed last."""
    return journal.folder / f"{names.current}-failed.log"
