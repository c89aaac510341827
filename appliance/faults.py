"""What can go wrong with an engine, and what is said and done about it. Pure."""

import contextlib
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from appliance import rootcause
from appliance.errors import ApplianceError, EngineError
from appliance.phases import Progress


class Cause(StrEnum):
    """Why an engine was lost: label ``cause`` of ``appliance_engine_restarts_total``."""

    PREFLIGHT = "preflight"  # a check before a start failed
    START_FAILED = "start_failed"  # it ended before it was ready
    START_STALLED = "start_stalled"  # it showed no progress for too long
    EXITED = "exited"  # it was ready and ended unasked, exit code 0 included


@dataclass(frozen=True)
class Fault:
    """One loss of an engine.

    Attributes:
        cause: its kind.
        text: one line for the user.
        settings: whether the settings or the model are to blame, so that another start would fail alike.
        exit_code: exit code of the appliance if it gives up over this.
    """

    cause: Cause
    text: str
    settings: bool = False
    exit_code: int = 1

    def last_word(self, failed_starts: int) -> ApplianceError:
        """What the appliance says when it gives up."""
        text = self.text
        if failed_starts > 1:
            text = f"gave up after {failed_starts} failed starts; the last one: {text}"
        error = EngineError(text)
        error.exit_code = self.exit_code
        return error


def of_exit(cause: Cause, code: int, log: Iterable[str]) -> Fault:
    """An engine that ended: its exit code, and the first exception of its log."""
    ended = f"the engine ended ({_in_words(code)})"
    found = rootcause.find(log)
    return Fault(cause, ended) if found is None else Fault(cause, f"{ended}: {found.text}", found.settings)


def of_stall(progress: Progress, seconds: float) -> Fault:
    """A start that shows no progress."""
    text = f"the start stands still: nothing new from the engine for {seconds:.0f} s, in phase {progress.phase}"
    return Fault(Cause.START_STALLED, text)


def pause_before_start(first: float, cap: float, failed_starts: int) -> float:
    """Seconds to wait before the next start: doubles with each consecutive failed one, up to a cap."""
    doublings = min(max(0, failed_starts - 1), 60)  # more would overflow long after the cap was reached
    return min(cap, first * 2.0**doublings)


def _in_words(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"
