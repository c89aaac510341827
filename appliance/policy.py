"""What is done about a lost engine: a table by class of failure, and the history that it is applied to. Pure.

Every loss is followed by another start after a pause, unless its policy or a limit says otherwise:

- failed starts in a row are limited, and so are losses of ready engines within a window. The window is of *serving*
  time: an engine that takes half an hour to start and dies at once would otherwise never reach a limit. An engine
  that serves for a whole window has a clean record.
- a policy's measure (one rung down, caches put aside) is taken once like failures have repeated ``after`` times.
  A rung down begins the counts anew: it is another engine.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from appliance.faults import Cause, Fault, Stage


class Action(StrEnum):
    """What follows a loss."""

    RETRY = "retry"
    ROTATE = "rotate"  # put the compile caches aside, then start
    DEGRADE = "degrade"  # one rung down the ladder, then start
    STOP = "stop"


@dataclass(frozen=True)
class Policy:
    """What is done about one class of failure.

    Attributes:
        action: the measure.
        advice: what a person can do.
        after: like failures until the measure is taken; plain retries before.
        patience: factor on the pauses.
        final: give up when no measure is left, because another start would fail alike.
    """

    action: Action
    advice: str
    after: int = 1
    patience: float = 1.0
    final: bool = False


POLICIES: dict[Cause, Policy] = {
    Cause.OUT_OF_MEMORY: Policy(
        Action.RETRY, "lower kv_cache_gib or max_model_len, or end what else holds memory", patience=4
    ),
    Cause.PROFILING_RACE: Policy(
        Action.RETRY, "another program freed memory during the start; kv_cache_gib makes vLLM measure none", patience=2
    ),
    Cause.KERNEL_IMAGE: Policy(
        Action.DEGRADE, "the image or its assembler does not know this GPU: `mjolnir doctor` shows which", final=True
    ),
    Cause.BAD_FLAG: Policy(Action.STOP, "change the setting or flag that the text names", final=True),
    Cause.BAD_MODEL: Policy(Action.STOP, "check the model's folder, or download it again", final=True),
    Cause.POISONED_CACHE: Policy(Action.ROTATE, "the compile caches are put aside and built anew", after=2),
    Cause.CUDA_ERROR: Policy(Action.DEGRADE, "report it with the log; POST /admin/restore tries T5 again", after=2),
    Cause.DISK_FULL: Policy(Action.RETRY, "free space on the disk or in /dev/shm that the text names", patience=4),
    Cause.HANG: Policy(Action.DEGRADE, "raise hang_seconds or start_timeout_seconds if it was only slow", after=2),
    Cause.SELF_TEST: Policy(Action.DEGRADE, "report it with the log; POST /admin/restore tries T5 again"),
    Cause.UNKNOWN: Policy(Action.ROTATE, "look at the engine's log around the failure", after=3),
}


@dataclass(frozen=True)
class Limits:
    """When to give up, and how long to pause.

    Attributes:
        failed_starts: failed starts in a row.
        crashes: losses of ready engines within the window.
        window: seconds of serving.
        pause: seconds before the first restart; it doubles with each further failure.
        cap: longest pause, seconds.
    """

    failed_starts: int = 5
    crashes: int = 5
    window: float = 1800.0
    pause: float = 1.0
    cap: float = 60.0


@dataclass(frozen=True)
class Decision:
    """What to do now.

    Attributes:
        action: the measure.
        pause: seconds before the next start.
        reason: for STOP, what was exhausted; empty where the first failure already was the last.
    """

    action: Action
    pause: float = 0.0
    reason: str = ""


class History:
    """The losses of engines with the same settings.

    Attributes:
        failed_starts: in a row, until now.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.failed_starts = 0
        self._strikes = 0  # failed starts since the last rung down
        self._losses: deque[tuple[float, Cause, Stage]] = deque(maxlen=1000)
        self._served = 0.0
        self._was_ready = False
        self._rotated = False

    def became_ready(self) -> None:
        """An engine got ready."""
        self.failed_starts = self._strikes = 0
        self._was_ready = True
        self._rotated = False

    def lost(self, fault: Fault, served: float, *, can_degrade: bool, can_rotate: bool) -> Decision:
        """Take in a loss and decide.

        Args:
            fault: what happened.
            served: seconds that the engine had been ready.
            can_degrade: there is a rung below.
            can_rotate: there are caches to put aside.
        """
        self._record(fault, served)
        policy = POLICIES[fault.cause]
        due = self._like(fault) >= policy.after
        pause = self._pause(policy)
        if policy.action is Action.DEGRADE and due and can_degrade:
            self._strikes = 0
            self._losses.clear()
            return Decision(Action.DEGRADE, pause)
        if self._crashes() >= self._limits.crashes and self._strikes == 0:
            reason = f"{self._crashes()} crashes within {self._limits.window:g} s of serving"
            return Decision(Action.STOP, reason=reason)
        if self._strikes >= self._limits.failed_starts or (policy.final and not self._was_ready):
            failed = f"{self.failed_starts} failed starts" if self.failed_starts > 1 else ""
            return Decision(Action.STOP, reason=failed)
        starting = fault.stage is Stage.START
        if policy.action is Action.ROTATE and due and can_rotate and starting and not self._rotated:
            self._rotated = True
            return Decision(Action.ROTATE, pause)
        return Decision(Action.RETRY, pause)

    def _record(self, fault: Fault, served: float) -> None:
        self._served += served
        self._losses.append((self._served, fault.cause, fault.stage))
        while self._losses[0][0] < self._served - self._limits.window:
            self._losses.popleft()
        if fault.stage is Stage.START:
            self.failed_starts += 1
            self._strikes += 1

    def _like(self, fault: Fault) -> int:
        return sum((cause, stage) == (fault.cause, fault.stage) for _, cause, stage in self._losses)

    def _crashes(self) -> int:
        return sum(stage is Stage.READY for _, _, stage in self._losses)

    def _pause(self, policy: Policy) -> float:
        return pause_before_start(
            self._limits.pause * policy.patience, self._limits.cap, max(self._strikes, self._crashes())
        )


def pause_before_start(first: float, cap: float, failures: int) -> float:
    """Seconds to wait before the next start: doubles with each further failure, up to a cap."""
    doublings = min(max(0, failures - 1), 60)  # more would overflow long after the cap was reached
    return min(cap, first * 2.0**doublings)
