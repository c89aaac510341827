"""Log records out of the engine's lines: a traceback is one, and so is an error that goes over several lines.

vLLM repeats a message's header on each of its lines; an uncaught exception has no header, or only its process. The
lines of several processes come mixed. A record waits for its next line, so whoever feeds the lines has to ``flush``
after a silence.
"""

import logging
from dataclasses import dataclass
from typing import Any

from appliance.engine_line import EngineLine, parse

ENGINE = "engine"  # name of the logger
RAW = "_raw"  # attribute of a record: its lines as they came

_MOST_LINES = 500  # of one record
_MOST_OPEN = 32
# What stands between the parts of a chained traceback.
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")

log = logging.getLogger(ENGINE)


@dataclass
class _Open:
    """A record that may have more lines to come."""

    first: EngineLine
    raw: list[str]
    texts: list[str]
    traceback_at: int | None = None  # where in the texts it begins
    ended: bool = False  # the exception itself was the last line
    continues: bool = False  # a record that became too long was told before

    def belongs(self, line: EngineLine) -> bool:
        """Whether a line of the same process goes on with this record."""
        if self.first.source:
            return line.header == self.first.header
        if line.source or (line.level is not None and not line.begins_traceback):
            return False
        if self.ended:
            return not line.text.strip() or line.begins_traceback or line.text.startswith(_CHAINED)
        return True

    def add(self, raw: str, line: EngineLine) -> None:
        """Take the line that belongs here."""
        if self.traceback_at is None and line.begins_traceback:
            self.traceback_at = len(self.texts)
        self.ended = bool(line.text.strip()) and not line.text[:1].isspace() and not line.begins_traceback
        if line.text.startswith(_CHAINED):
            self.ended = False
        self.raw.append(raw)
        self.texts.append(line.text)


class RecordGrouper:
    """Turns cleaned lines into records of the logger ``engine``.

    A record's message is what it says without headers. Its other attributes: ``engine_process``, ``engine_pid``,
    ``engine_source``, of a traceback ``exception``, and ``RAW``.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    @property
    def open(self) -> bool:
        """Whether a record waits for its next line."""
        return bool(self._open)

    def take(self, raw: str) -> None:
        """Take in the next line."""
        line = parse(raw)
        key = f"{line.process} {line.pid}"
        record = self._open.get(key)
        if record is not None and record.belongs(line):
            record.add(raw, line)
            if len(record.texts) >= _MOST_LINES:
                _emit(record)
                empty = _Open(record.first, [], [], 0 if record.traceback_at is not None else None, continues=True)
                self._open[key] = empty
            return
        if record is not None:
            self._end(key)
        record = _Open(line, [], [])
        record.add(raw, line)
        if (line.level or 0) < logging.ERROR:
            _emit(record)
            return
        if len(self._open) >= _MOST_OPEN:
            self.flush()
        self._open[key] = record

    def flush(self) -> None:
        """Tell what waits."""
        for key in list(self._open):
            self._end(key)

    def _end(self, key: str) -> None:
        record = self._open.pop(key)
        if record.texts:
            _emit(record)


def _emit(record: _Open) -> None:
    first, at = record.first, record.traceback_at
    extra: dict[str, Any] = {RAW: record.raw}
    if first.process:
        extra |= {"engine_process": first.process, "engine_pid": first.pid}
    if first.source:
        extra["engine_source"] = first.source
    if record.continues:
        extra["continued"] = True
    message = "\n".join(record.texts if at is None else record.texts[:at])
    if at is not None:
        extra["exception"] = "\n".join(record.texts[at:]).rstrip()
        # A bare traceback: what it comes to is its last line that is not a frame's.
        told = [text for text in record.texts[at:] if text.strip() and not text[:1].isspace()]
        message = message or (told[-1] if told else record.texts[at])
    level = logging.INFO if first.level is None else first.level
    log.log(level, "%s", message, extra=extra)
