"""What is seen of `mjolnir serve`: progress on a terminal, plain lines or JSON everywhere else."""

import logging
import sys
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from appliance.lifecycle import State
from appliance.log import ENGINE, JsonLines
from appliance.phases import ORDER, Phase
from appliance.phases import Progress as StartProgress
from appliance.settings import LogFormat, LogLevel
from appliance.watcher import Watcher

log = logging.getLogger(__name__)

_WORDS = {
    Phase.IMPORT: "importing vLLM",
    Phase.CONFIGURE: "reading the model's configuration",
    Phase.LOAD: "loading weights",
    Phase.COMPILE: "compiling",
    Phase.KV_CACHE: "allocating the KV cache",
    Phase.CAPTURE: "capturing CUDA graphs",
    Phase.WARM_UP: "warming up",
    Phase.SERVER: "starting the server",
    Phase.SELF_TEST: "asking the first question",
}


class Terminal(Watcher):
    """Follows the supervisor; a context manager, because it must give the terminal back in order.

    On a terminal the engine's own lines below WARNING are left out (``--log-level debug`` shows them): the bar
    says what they say. They stay in the tail that `/status` shows.
    """

    def __init__(self, log_level: LogLevel, log_format: LogFormat | None = None) -> None:
        self._console = Console(stderr=True)
        self._json = log_format == "json"
        self._rich = log_format is None and self._console.is_terminal
        self._all_lines = log_level == "debug"
        self._url = self._model = ""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bar()

    def introduce(self, url: str, model: str) -> None:
        """Tell what will be served where."""
        self._url, self._model = url, model

    def log_handler(self) -> logging.Handler:
        """Where log messages go."""
        if not self._rich:
            plain = logging.StreamHandler(sys.stderr)
            if self._json:
                plain.setFormatter(JsonLines())
            return plain
        handler = RichHandler(console=self._console, show_path=False, markup=False, log_time_format="[%X]")
        handler.addFilter(self._worth_showing)
        return handler

    def state_changed(self, state: State) -> None:
        """Show or hide the bar."""
        if not self._rich:
            return
        self._end_bar()
        if state in (State.PREFLIGHT, State.STARTING, State.DRAINING):
            self._bar.start()
            words = {State.PREFLIGHT: "checking", State.STARTING: "starting", State.DRAINING: "stopping"}[state]
            self._task = self._bar.add_task(words, total=None, detail="")

    def progressed(self, progress: StartProgress) -> None:
        """Move the bar, or write a line."""
        percent = "" if progress.percent is None else f"{progress.percent}%"
        if self._rich and self._task is not None:
            done = ORDER[progress.phase] + (progress.percent or 0) / 100
            self._bar.update(
                self._task, description=_WORDS[progress.phase], completed=done, total=len(ORDER), detail=percent
            )
        elif not self._rich and progress.percent in (None, 100):
            extra = {"phase": progress.phase, "percent": progress.percent}
            log.info("%s", f"{_WORDS[progress.phase]} {percent}".rstrip(), extra=extra)

    def became_ready(self, seconds: float) -> None:
        """Say where the model is served, and how to try it."""
        self._end_bar()
        if self._json:
            extra = {"seconds": round(seconds, 3), "model": self._model, "url": f"{self._url}/v1"}
            log.info("ready after %.1f s", seconds, extra=extra)
            return
        body = f'{{"model": "{self._model}", "temperature": 0, "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self._console.print(
            f"ready after {seconds:.1f} s: {self._model} at {self._url}/v1\n"
            f"curl {self._url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _end_bar(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
            self._bar.stop()

    def _worth_showing(self, record: logging.LogRecord) -> bool:
        return self._all_lines or record.name != ENGINE or record.levelno >= logging.WARNING
