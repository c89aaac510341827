"""Which engine is to run: settings under a name, how far they are degraded, and what became of their engines."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance import command
from appliance.command import Launch
from appliance.faults import Fault
from appliance.ladder import Ladder, Rung, rungs_of
from appliance.lifecycle import State
from appliance.phases import Progress
from appliance.policy import History, Limits
from appliance.settings import Settings


@dataclass
class Target:
    """One engine that is wanted.

    Attributes:
        name: of its profile; empty for the settings that the appliance was started with.
        settings: of the engine; those of the appliance itself (address, keys, folders) are not looked at.
        launch: at the top of the ladder.
        ladder: where it stands.
        history: of its losses.
    """

    name: str
    settings: Settings
    launch: Launch
    ladder: Ladder
    history: History


def target_of(name: str, settings: Settings, inherited: dict[str, str], runtime_dir: Path, stats_dir: Path) -> Target:
    """The target of some settings; see ``command.build``."""
    launch = command.build(settings, inherited, runtime_dir, stats_dir)
    rungs = rungs_of(settings, launch.environment, launch.command, command.has_gpu())
    return Target(name, settings, launch, Ladder(rungs), History(limits_of(settings)))


def limits_of(settings: Settings) -> Limits:
    """Limits of restarts, as the settings have them."""
    return Limits(
        failed_starts=settings.restart_limit,
        crashes=settings.crash_limit,
        window=settings.crash_window_seconds,
        pause=settings.backoff_seconds,
        cap=settings.backoff_cap_seconds,
    )


@dataclass(frozen=True)
class Switched:
    """What came of a request to run another engine.

    Attributes:
        name: of the profile that was asked for.
        done: whether it runs now; else the engine from before runs again, or still.
        reason: why not; empty when done.
    """

    name: str
    done: bool
    reason: str = ""


@dataclass
class Change:
    """A request that the supervisor's task has to carry out.

    Attributes:
        target: what is to run.
        previous: what to return to; None for a restart of the same engine at the top of its ladder.
        outcome: is given the result.
    """

    target: Target
    previous: Target | None
    outcome: "asyncio.Future[Switched]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __str__(self) -> str:
        """What it leads to, for people."""
        return repr(self.target.name) if self.target.name else "the settings without a profile"

    def ended(self, *, done: bool, reason: str = "") -> Switched:
        """Tell what came of it; a second telling changes nothing."""
        result = Switched(self.target.name, done, reason)
        if not self.outcome.done():
            self.outcome.set_result(result)
        return result


@dataclass(frozen=True)
class Status:
    """What the supervisor says about itself at one moment."""

    state: State
    progress: Progress | None
    fault: Fault | None
    restarts: int
    failed_starts: int
    ready_seconds: float | None
    rung: Rung
    switched: Switched | None
    events: list[dict[str, Any]]
    log_tail: list[str]
