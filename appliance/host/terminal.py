"""What a person sees of a host command: a spinner on a terminal, plain lines elsewhere, and the outcome."""

import json
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status

from appliance.host.plan import Action


class Terminal:
    """Progress on stderr; silent where ``quiet`` (a program reads the outcome). A context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> "Terminal":
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def action(self, action: Action, words: str) -> None:
        """Show an action of the plan and, while it waits, for what."""
        self.say(f"{action}{words and ': ' + words}", step=not words)

    def say(self, text: str, *, step: bool = False) -> None:
        """Show a line: on a terminal it replaces the one before; elsewhere what repeats itself is left out."""
        if not text or text == self._last:
            return
        self._last = text
        if self._status is not None:
            self._status.update(text)
            if not step:
                return
        self._console.print(text, markup=False, soft_wrap=True)


def show(outcome: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print an outcome to stdout: one JSON object, or one line."""
    sys.stdout.write((json.dumps(outcome) if as_json else text) + "\n")
