"""What can go wrong with an engine, and how it is put into words. Pure."""

import contextlib
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from appliance import classify, rootcause
from appliance.classify import Cause
from appliance.errors import ApplianceError, EngineError, ModelError, NoRoomError, SettingsError
from appliance.phases import Progress

__all__ = ["Cause", "Fault", "Stage"]

_OF_CHECK: tuple[tuple[type[ApplianceError], Cause], ...] = (
    (SettingsError, Cause.BAD_FLAG),
    (ModelError, Cause.BAD_MODEL),
    (NoRoomError, Cause.OUT_OF_MEMORY),
)


class Stage(StrEnum):
    """How far an engine had come when it was lost."""

    START = "start"  # not ready yet; its checks included
    READY = "ready"


@dataclass(frozen=True)
class Fault:
    """One loss of an engine.

    Attributes:
        cause: its class.
        text: one line for the user.
        stage: whether the engine had been ready.
        exit_code: exit code of the appliance if it gives up over this.
    """

    cause: Cause
    text: str
    stage: Stage = Stage.START
    exit_code: int = 1

    def last_word(self, reason: str = "") -> ApplianceError:
        """What the appliance says when it gives up; ``reason`` tells why it does not try again."""
        error = EngineError(f"gave up after {reason}; the last one: {self.text}" if reason else self.text)
        error.exit_code = self.exit_code
        return error


def of_check(error: ApplianceError) -> Fault:
    """A check before a start that failed."""
    cause = next((cause for kind, cause in _OF_CHECK if isinstance(error, kind)), None)
    text = str(error)
    return Fault(cause or classify.of_text(text) or Cause.UNKNOWN, text, exit_code=error.exit_code)


def of_exit(stage: Stage, code: int, log: Iterable[str]) -> Fault:
    """An engine that ended: its exit code, and the first exception of its log."""
    return of_log(stage, f"the engine ended ({_in_words(code)})", log)


def of_log(stage: Stage, told: str, log: Iterable[str]) -> Fault:
    """A loss whose cause stands in the engine's log, if anywhere.

    A serving engine also logs the mistakes of its clients' requests, so what looks like a mistake of the settings
    is none there.
    """
    lines = list(log)
    found = rootcause.find(lines)
    cause = classify.of_log(found, lines)
    if stage is Stage.READY and cause in (Cause.BAD_FLAG, Cause.BAD_MODEL):
        cause = Cause.UNKNOWN
    return Fault(cause, told if found is None else f"{told}: {found.text}", stage)


def of_self_test(told: str, log: Iterable[str]) -> Fault:
    """An engine that did not answer the first request as it should."""
    fault = of_log(Stage.READY, f"the self-test failed: {told}", log)
    cause = Cause.SELF_TEST if fault.cause is Cause.UNKNOWN else fault.cause
    return Fault(cause, fault.text)


def of_stall(progress: Progress, seconds: float) -> Fault:
    """A start that shows no progress."""
    text = f"the start stands still: nothing new from the engine for {seconds:.0f} s, in phase {progress.phase}"
    return Fault(Cause.HANG, text)


def of_floor(progress: Progress, available: float, floor: float) -> Fault:
    """A start that would have locked up the machine; both figures in bytes."""
    text = (
        f"memory available fell to {available / 2**30:.2f} GiB in phase {progress.phase}, below the floor of "
        f"{floor / 2**30:.2f} GiB (memory_floor_gib)"
    )
    return Fault(Cause.OUT_OF_MEMORY, text)


def of_hang(strikes: int, seconds: float, last: str) -> Fault:
    """A ready engine that does not get on with its work."""
    text = f"the engine hangs: no progress in {strikes} looks over {seconds:.0f} s ({last})"
    return Fault(Cause.HANG, text, Stage.READY)


def _in_words(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"
