"""Who wants to know what the supervisor does."""

from appliance.faults import Cause
from appliance.ladder import Rung
from appliance.lifecycle import State
from appliance.phases import Progress


class Watcher:
    """Base of those who follow the engine's life; by default each event is ignored.

    The methods are called from the supervisor's task and must not block it.
    """

    def state_changed(self, state: State) -> None:
        """The engine is in another state."""

    def progressed(self, progress: Progress) -> None:
        """A start has moved on."""

    def became_ready(self, seconds: float) -> None:
        """The engine answers, ``seconds`` after its start; no request has reached it yet."""

    def engine_gone(self) -> None:
        """Every process of the engine has ended."""

    def restarting(self, cause: Cause) -> None:
        """A lost engine will be started again."""

    def degraded(self, rung: Rung) -> None:
        """The next start is made on another rung of the ladder."""

    def struck(self) -> None:
        """A look at a ready engine found no progress."""

    def rotated(self, folders: int) -> None:
        """So many compile caches were put aside."""

    def orphans_ended(self, processes: int) -> None:
        """So many processes that a dead appliance had left were ended."""

    def noted(self, text: str) -> None:
        """Something happened that a person may want to know."""
