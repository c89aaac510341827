"""Joules by rail, summed up between scrapes so that they only grow. Pure.

A rail whose hardware counts energy itself gives the differences of that counter. Of the others the power is
integrated by the trapezoidal rule over the samples: a rail that draws P1 and P2 watts at two samples dt seconds
apart adds (P1 + P2) / 2 * dt joules.
"""

from collections.abc import Mapping

LONGEST_GAP_SECONDS = 15.0  # between samples; over a longer one nothing is known, and nothing is counted


class EnergyMeter:
    """Totals since it was made.

    Attributes:
        joules: by rail, monotone.
    """

    def __init__(self) -> None:
        self.joules: dict[str, float] = {}
        self._power: dict[str, tuple[float, float]] = {}
        self._counted: dict[str, float] = {}

    def feed(
        self, at: float, watts: Mapping[str, float], counted: Mapping[str, tuple[float, float | None]] | None = None
    ) -> None:
        """Take in a sample.

        Args:
            at: time of the sample, seconds of a clock that never goes back.
            watts: power by rail.
            counted: hardware's energy counters by rail, joules, with the value where they wrap. These rails' power
                is not integrated as well.
        """
        counted = counted or {}
        for rail, (now, wrap) in counted.items():
            before = self._counted.get(rail)
            self._counted[rail] = now
            self._add(rail, 0.0 if before is None else _difference(before, now, wrap))
        for rail, power in watts.items():
            if rail in counted:
                continue
            last = self._power.get(rail)
            self._power[rail] = at, power
            joules = 0.0
            if last is not None and 0 < at - last[0] <= LONGEST_GAP_SECONDS:
                joules = (last[1] + power) / 2 * (at - last[0])
            self._add(rail, joules)

    def _add(self, rail: str, joules: float) -> None:
        # A monitor may show a small negative current at rest: a total must not shrink for it.
        self.joules[rail] = self.joules.get(rail, 0.0) + max(0.0, joules)


def _difference(before: float, now: float, wrap: float | None) -> float:
    """Joules between two values of a counter; a counter that went back has wrapped, or else was reset."""
    if now >= before:
        return now - before
    return now + wrap - before if wrap is not None and before <= wrap else now
