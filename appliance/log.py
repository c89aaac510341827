"""Logging: one line a message, the engine's lines among ours, secrets masked, no writer ever held up.

Messages go through a bounded queue to a thread that writes them. A terminal that was stopped with Ctrl-S or a
container runtime with a full pipe would otherwise block the event loop, and with it every stream.
"""

import contextlib
import logging
import queue
import re
from collections.abc import Iterable, Iterator, Mapping
from logging.handlers import QueueHandler, QueueListener

ENGINE = "engine"
MASK = "***"

_QUEUE_MESSAGES = 10_000
_LEVEL = re.compile(r"(?:^|\) ?)(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d ")
_SECRET_FLAGS = ("--api-key", "--hf-token")
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|API_KEYS?|SECRET|PASSWORD)(?:$|_)")
_SHORTEST_SECRET = 4  # masking shorter ones would make the log unreadable and hide nothing


class Redactor:
    """Replaces known secrets in text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        worth = sorted({s for s in secrets if len(s) >= _SHORTEST_SECRET}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, worth))) if worth else None

    def __call__(self, text: str) -> str:
        """The text with every secret masked."""
        return self._pattern.sub(MASK, text) if self._pattern else text


def secrets_of(words: Iterable[str], environment: Mapping[str, str]) -> set[str]:
    """Values of secret flags on a command line, and of variables whose name says that they are secret."""
    found = {value for name, value in environment.items() if _SECRET_VARIABLE.search(name.upper()) and value}
    secret = False
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            secret = name.replace("_", "-") in _SECRET_FLAGS
            if secret and value:
                found.add(value)
        elif secret:
            found.add(word)  # --api-key takes several
    return found


def level_of(line: str) -> int:
    """Severity of a line of vLLM's log; a line without one (a warning of Python's, a progress bar) is INFO."""
    match = _LEVEL.search(line[:80])
    return logging.getLevelNamesMapping()[match[1]] if match else logging.INFO


class _Formatter(logging.Formatter):
    """``time level source message``; the engine's lines carry their own time and level and only get a prefix."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        if record.name == ENGINE:
            return f"[engine] {record.getMessage()}"
        return self._redactor(super().format(record))


class _DroppingQueueHandler(QueueHandler):
    """Drops messages when the queue is full; the log's reader is told how many once it reads again."""

    def __init__(self, messages: "queue.Queue[logging.LogRecord]") -> None:
        super().__init__(messages)
        self._dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                note = f"{self._dropped} log messages were dropped"
                told = logging.LogRecord(__name__, logging.WARNING, "", 0, note, None, None)
                self.queue.put_nowait(told)
                self._dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1


@contextlib.contextmanager
def logging_to(handler: logging.Handler, level: str, redactor: Redactor) -> Iterator[None]:
    """Send every log message of the process to ``handler`` while the context lasts.

    Args:
        handler: where messages go; its own level and formatter are kept if it has them.
        level: least severe message that is taken.
        redactor: masks secrets.
    """
    if handler.formatter is None:
        handler.setFormatter(_Formatter(redactor))
    messages: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUE_MESSAGES)
    listener = QueueListener(messages, handler, respect_handler_level=True)
    root = logging.getLogger()
    inlet = _DroppingQueueHandler(messages)
    root.addHandler(inlet)
    root.setLevel(level.upper())
    for name in ("uvicorn", "asyncio", "aiohttp", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(inlet)
        listener.stop()
