"""What happens, told to those who want to know; what happened lately, kept for people.

The journal is bounded and in memory; the status page and ``/status`` show it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from appliance.faults import Cause
from appliance.lifecycle import State
from appliance.watcher import Watcher

log = logging.getLogger(__name__)

MOST = 100


class Journal(Watcher):
    """The last events, each with its time (seconds since 1970) and one line of text."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return list(self._events)

    def noted(self, text: str) -> None:
        """Keep an event."""
        self._events.append({"at": round(time.time(), 1), "text": text})

    def state_changed(self, state: State) -> None:
        """Keep the change."""
        self.noted(str(state))

    def became_ready(self, seconds: float) -> None:
        """Keep how long the start took."""
        self.noted(f"the engine answers after {seconds:.1f} s")

    def restarting(self, cause: Cause) -> None:
        """Keep the restart."""
        self.noted(f"restart: {cause}")


class Audience:
    """Everyone who is told.

    Attributes:
        journal: keeps the last events.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.journal = Journal()
        self._watchers = [self.journal, *watchers]

    def join(self, watcher: Watcher) -> None:
        """Tell one more watcher what happens from now on."""
        self._watchers.append(watcher)

    def tell(self, call: Callable[[Watcher], None]) -> None:
        """Tell everyone."""
        for watcher in self._watchers:
            call(watcher)

    def note(self, text: str, call: Callable[[Watcher], None] = lambda _: None, level: int = logging.INFO) -> None:
        """Tell everyone, the log and the journal."""
        log.log(level, "%s", text)
        self.tell(lambda watcher: watcher.noted(text))
        self.tell(call)
