"""Logging: one line a message, the engine's lines among ours, secrets masked, no writer ever held up.

Messages go through a bounded queue to a thread that writes them. A terminal that was stopped with Ctrl-S or a
container runtime with a full pipe would otherwise block the event loop, and with it every stream. Before a message
enters the queue, secrets are masked in all of its parts, so no way of writing it can show one.
"""

import contextlib
import copy
import logging
import queue
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from appliance.engine_line import neutralise
from appliance.engine_record import ENGINE, RAW
from appliance.redaction import Redactor, secrets_of

__all__ = ["ENGINE", "JsonLines", "Redactor", "logging_to", "secrets_of"]

_QUEUE_MESSAGES = 10_000
_QUEUE_BYTES = 8 << 20
_FOR_URGENT = 0.2  # share of the queue that only warnings and errors may use
_RECORD_BYTES = 1024  # what a message costs besides its text
_SIZE = "_size"  # attributes with an underscore are in no output
_OWN = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}


class TextLines(logging.Formatter):
    """``time level source message``; the engine's lines carry their own time and level and only get a prefix."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record."""
        if record.name == ENGINE:
            lines = record.__dict__.get(RAW) or [record.getMessage()]
            return "\n".join(f"[engine] {line}" for line in lines)
        return super().format(record)


class JsonLines(JsonFormatter):
    """One JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, and what a call adds.

    An exception is the field ``exception``. Whatever is not printable ASCII is escaped, line ends too.
    """

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"},
            reserved_attrs=RESERVED_ATTRS,
            json_ensure_ascii=True,
            json_default=str,
        )

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Fill in the object's fields; the time is its first."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        log_data["time"] = moment.replace("+00:00", "Z")
        super().add_fields(log_data, record, message_dict)
        log_data["level"] = record.levelname.lower()


class _Messages(queue.Queue[Any]):
    """A queue that is bounded by its messages' number and size; the last part is for warnings and errors."""

    queue: deque[Any]

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0

    def offer(self, record: logging.LogRecord) -> bool:
        """Put a message into the queue if there is room for one of its level."""
        urgent = record.levelno >= logging.WARNING and record.name != __name__  # our own count can wait
        share = 1.0 if urgent else 1.0 - _FOR_URGENT
        with self.mutex:
            if self._bytes >= share * _QUEUE_BYTES or len(self.queue) >= share * _QUEUE_MESSAGES:
                return False
        self.put_nowait(record)
        return True

    def _put(self, item: Any) -> None:
        self._bytes += _size(item)
        super()._put(item)

    def _get(self) -> Any:
        item = super()._get()
        self._bytes -= _size(item)
        return item


def _size(item: Any) -> int:
    return getattr(item, _SIZE, 0)  # the listener's own mark of the end has none


class _Inlet(QueueHandler):
    """Masks, and drops what the queue has no room for; the log's reader is told how many once it reads again."""

    def __init__(self, messages: _Messages, redactor: Redactor) -> None:
        super().__init__(messages)
        self._messages = messages
        self._redactor = redactor
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy that holds masked text only: no arguments, no exception, no objects of the caller's."""
        done = copy.copy(record)
        clean = record.name == ENGINE  # see engine_log
        done.message = done.msg = self._text(record.getMessage(), clean=clean)
        done.args = done.exc_info = None
        trace = record.exc_text
        if record.exc_info and record.exc_info[0] is not None:
            trace = logging.Formatter().formatException(record.exc_info)
        done.exc_text = self._lines(trace) if trace else None
        done.stack_info = self._lines(record.stack_info) if record.stack_info else None
        for name in set(done.__dict__) - _OWN:
            if not clean:
                done.__dict__[name] = self._value(done.__dict__[name])
        done.__dict__[_SIZE] = _RECORD_BYTES + 2 * len(done.msg) + len(done.exc_text or "")
        return done

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a message, and before it how many had to be dropped."""
        if self._dropped and self._messages.offer(self._told()):
            self._dropped = 0
        if not self._messages.offer(record):
            # A summary of lines that were dropped before is never dropped itself: it goes into this one.
            self._dropped += record.__dict__.get("dropped", 1)

    def finish(self, handler: logging.Handler) -> None:
        """Tell what could not be told; nobody reads the queue any more."""
        if self._dropped:
            handler.handle(self._told())
            self._dropped = 0

    def _told(self) -> logging.LogRecord:
        note = f"{self._dropped} log messages were dropped: nobody read them"
        told = logging.LogRecord(__name__, logging.WARNING, "", 0, note, None, None)
        told.__dict__["dropped"] = self._dropped
        return told

    def _text(self, text: str, *, clean: bool = False) -> str:
        return text if clean else self._redactor(neutralise(text))

    def _lines(self, text: str) -> str:
        """Text of several lines; a secret may hold a line's end, and a line may hold what is none."""
        return "\n".join(self._text(line) for line in text.splitlines())

    def _value(self, value: object) -> object:
        if value is None or (isinstance(value, bool | int | float) and not isinstance(value, Enum)):
            return value
        return self._text(str(value))


@contextlib.contextmanager
def logging_to(handler: logging.Handler, level: str, redactor: Redactor) -> Iterator[None]:
    """Send every log message of the process to ``handler`` while the context lasts.

    Args:
        handler: where messages go; its own level and formatter are kept if it has them.
        level: least severe message that is taken.
        redactor: masks secrets.
    """
    if handler.formatter is None:
        handler.setFormatter(TextLines())
    messages = _Messages()
    listener = QueueListener(messages, handler, respect_handler_level=True)
    root = logging.getLogger()
    inlet = _Inlet(messages, redactor)
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
        inlet.finish(handler)
