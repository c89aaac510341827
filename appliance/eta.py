"""How much longer a start will take: from the last start that went through, else from the phase's percentage. Pure."""

from dataclasses import dataclass, field

from appliance.phases import Phase, Progress


@dataclass(frozen=True)
class Eta:
    """Seconds that are left: of the whole start and of its present phase; None where there is nothing to go by."""

    total: float | None = None
    phase: float | None = None


@dataclass
class StartClock:
    """Follows starts; times are seconds of a clock that never goes back."""

    _began: float | None = None
    _entered: float = 0.0
    _progress: Progress = field(default_factory=Progress)
    _offsets: dict[Phase, float] = field(default_factory=dict)
    _last: dict[Phase, float] = field(default_factory=dict)
    _last_total: float | None = None

    def begin(self, at: float) -> None:
        """A start has begun."""
        self._began = self._entered = at
        self._progress = Progress()
        self._offsets = {self._progress.phase: 0.0}

    def progressed(self, at: float, progress: Progress) -> None:
        """The start has moved."""
        if self._began is None:
            return
        if progress.phase is not self._progress.phase:
            self._entered = at
            self._offsets[progress.phase] = at - self._began
        self._progress = progress

    def ready(self, seconds: float) -> None:
        """The start went through, in so many seconds."""
        self._last, self._last_total = self._offsets, seconds
        self._began = None

    def abandon(self) -> None:
        """The start was given up."""
        self._began = None

    def eta(self, at: float) -> Eta:
        """What is left; an estimate that the start has outlived is none any more."""
        if self._began is None:
            return Eta()
        spent = at - self._entered
        total = None
        if self._last_total is not None and self._progress.phase in self._last:
            left = self._last_total - self._last[self._progress.phase] - spent
            total = left if left > 0 else None
        percent = self._progress.percent
        phase = spent * (100 - percent) / percent if percent else None
        return Eta(total, phase)
