"""Which share of the decode steps runs on T5, and whether that is a reason to call someone. Pure.

A step with prompts in it runs on the fallback by design, so ``prefill`` and ``mixed`` say nothing about T5 and are
left out of the share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mjolnir.names import FallbackReason, StepKind

BY_DESIGN = frozenset({FallbackReason.PREFILL, FallbackReason.MIXED})

_T5 = tuple(f"t5:{kind}" for kind in StepKind)
_MISSED = {f"fallback:{reason}": reason for reason in FallbackReason if reason not in BY_DESIGN}


@dataclass(frozen=True)
class Limits:
    """When the share is too low.

    Attributes:
        window: seconds that are looked at.
        raise_below: share under which the alert is raised.
        clear_above: share from which on it is cleared; higher, so that a share near the limit does not flap.
        least_steps: decode steps in the window under which nothing new is concluded.
    """

    window: float = 120.0
    raise_below: float = 0.90
    clear_above: float = 0.95
    least_steps: int = 50


@dataclass(frozen=True)
class Verdict:
    """What the window shows.

    Attributes:
        alert: whether T5 runs too few of the decode steps.
        share: of the window's decode steps, 0 to 1; None without any.
        steps: decode steps in the window.
        reason: the most frequent reason of the decode steps that T5 missed; empty if it missed none.
    """

    alert: bool = False
    share: float | None = None
    steps: int = 0
    reason: str = ""


Point = tuple[float, Mapping[str, int]]


def judge(points: Sequence[Point], before: bool, limits: Limits | None = None) -> Verdict:
    """Judge the newest window.

    Args:
        points: (seconds, totals by the names of ``mjolnir.counters.COUNTERS``), oldest first.
        before: whether the alert was raised until now.
        limits: thresholds; None takes the default ones.
    """
    limits = limits or Limits()
    if not points:
        return Verdict(before)
    end, newest = points[-1]
    oldest = next(totals for at, totals in points if at >= end - limits.window)
    ran = sum(_grown(oldest, newest, name) for name in _T5)
    missed = {reason: _grown(oldest, newest, name) for name, reason in _MISSED.items()}
    steps = ran + sum(missed.values())
    if steps == 0:
        return Verdict()  # no decode step runs, so none is slow
    share = ran / steps
    alert = before
    if steps >= limits.least_steps:
        alert = share < limits.clear_above if before else share < limits.raise_below
    worst = max(missed, key=lambda reason: missed[reason])
    return Verdict(alert, share, steps, str(worst) if missed[worst] else "")


def _grown(oldest: Mapping[str, int], newest: Mapping[str, int], name: str) -> int:
    return max(0, newest.get(name, 0) - oldest.get(name, 0))
