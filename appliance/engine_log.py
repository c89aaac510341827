"""The engine's log on its way from the pipe to ours: lines cleaned, floods held back, tracebacks kept together.

What is let through is counted for each process of the engine, so that one that floods takes nothing from the others;
errors and tracebacks have a share of their own. All lines, also those held back, are kept for a while as they came:
the cause of a death is looked for in them. 100,000 lines of 108 bytes in one go, of which
2,000 are shown and written, cost the supervisor 0.3 s of a core and 2 MB (three runs, on a shared machine).
"""

import logging
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from appliance.engine_line import bar_of, neutralise, shorten
from appliance.engine_record import ENGINE, RecordGrouper
from appliance.redaction import LONGEST
from appliance.throttle import TokenBucket

log = logging.getLogger(ENGINE)

LINES_PER_SECOND = 200.0
BURST_LINES = 2000.0  # a start of vLLM says some hundred lines, a traceback through it one hundred

_RAW_LINE_BYTES = 16384  # of a line that is kept; what is shown is half of it, see _clean
_COST_BYTES = 4096  # a longer line counts as several
_TAIL_LINES = 4000
_TAIL_BYTES = 4 << 20
_SHOWN_LINES = 1000
_BATCH_LINES = 32  # taken up without a pause
_MOST_SOURCES = 32  # what an engine calls its processes is its own affair, and could be without end
_SUMMARY_SECONDS = 5.0
_BAR_SECONDS = 5.0
_MOST_BARS = 64
_IDLE_SECONDS = 0.25
_HEADER = re.compile(rb"^(?:\([^()]{1,80}\)\s?)?(?:[A-Z]{4,8} \d\d-\d\d [\d:.,]{8,15} \[[^\]]{0,200}\] ?)?")
_URGENT = (
    *(b"ERROR", b"CRITICAL", b"Traceback (most", b"Fatal Python error", b"Segmentation fault"),
    *(b"terminate called", b"what():", b"CUDA error", b"out of memory"),
)


class _Source:
    """One process of the engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = TokenBucket(LINES_PER_SECOND, BURST_LINES)
        self.urgent = TokenBucket(LINES_PER_SECOND, BURST_LINES)
        self.in_traceback = False
        self.dropped = 0
        self.told_at = 0.0

    def is_urgent(self, line: bytes) -> bool:
        """Whether a line belongs to an error; has to see every line while ``in_traceback``."""
        if any(word in line for word in _URGENT):
            self.in_traceback = self.in_traceback or b"Traceback (most" in line
            return True
        was = self.in_traceback
        if was:
            text = _HEADER.sub(b"", line, count=1)
            self.in_traceback = not text.strip() or text[:1].isspace()  # the exception itself is the last line
        return was


class EngineLog:
    """The log of one run of the engine.

    Args:
        redact: masks secrets; is given lines without control characters.
        on_line: is given every line that is let through, cleaned, progress bars included.
    """

    def __init__(self, redact: Callable[[str], str], on_line: Callable[[str], None]) -> None:
        self._redact = redact
        self._on_line = on_line
        self._pending = b""
        self._raw: deque[tuple[float, list[bytes]]] = deque()
        self._raw_lines = self._raw_bytes = 0
        self._waiting: deque[bytes] = deque()
        self._sources: dict[bytes, _Source] = {b"": _Source("")}
        self._bars = _Bars()
        self._shown: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._grouper = RecordGrouper()
        self._now = 0.0

    def feed(self, data: bytes, now: float) -> bool:
        """Take in what was read; ``steps`` then goes on with it.

        Returns:
            Whether most of it was held back: whoever reads may take a rest, by which the engine has to take one too.
        """
        self._now = now
        lines = self._split(data)
        self._keep(now, lines)
        # Seldom true in a flood, and one search through all of it costs less than one a line.
        urgent = any(word in data for word in _URGENT)
        before = len(self._waiting)
        for line in lines:
            source = self._source_of(line)
            important = (urgent or source.in_traceback) and source.is_urgent(line)
            cost = 1.0 + len(line) // _COST_BYTES
            if source.lines.take(now, cost) or (important and source.urgent.take(now, cost)):
                self._waiting.append(line)
            else:
                source.dropped += 1
        self._tell_dropped(now - _SUMMARY_SECONDS)
        endless = len(self._pending) >= _RAW_LINE_BYTES and not lines
        return endless or len(self._waiting) - before < len(lines) // 2

    def steps(self) -> Iterator[None]:
        """Tell the lines that were let through, some in each step."""
        while self._waiting:
            for _ in range(min(_BATCH_LINES, len(self._waiting))):
                self._tell(self._waiting.popleft())
            yield

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which ``idle`` wants to be called; None where it has nothing to do."""
        unfinished = self._grouper.open or any(source.dropped for source in self._sources.values())
        return _IDLE_SECONDS if unfinished else None

    def idle(self, now: float) -> None:
        """Nothing came for a while: what waits for more is told as it is, but no unfinished line."""
        self._now = now
        self._grouper.flush()
        self._tell_dropped(self._now)

    def close(self) -> None:
        """Nothing comes any more: tell all that is left."""
        if self._pending:
            self.feed(b"\n", self._now)
        for _ in self.steps():
            pass
        self.idle(self._now)

    def tail(self, lines: int) -> list[str]:
        """The last lines that were shown."""
        return list(self._shown)[-lines:]

    def since(self, oldest: float) -> list[str]:
        """Every line that came after a moment and is still kept, cleaned, also those that were held back."""
        kept = [line for moment, lines in self._raw if moment >= oldest for line in lines]
        return [text for text in map(self._clean, kept) if text]

    def _split(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes; a progress bar's carriage return ends one too."""
        *lines, rest = data.replace(b"\r", b"\n").split(b"\n")
        if not lines:
            # Of a line that does not end, only the beginning is kept.
            self._pending += rest[: _RAW_LINE_BYTES - len(self._pending)]
            return []
        first = self._pending + lines[0][: _RAW_LINE_BYTES - len(self._pending)]
        lines[0], self._pending = first, rest[:_RAW_LINE_BYTES]
        return [line for line in lines if line]

    def _keep(self, now: float, lines: list[bytes]) -> None:
        self._raw.append((now, lines))
        self._raw_lines += len(lines)
        self._raw_bytes += sum(map(len, lines))
        while len(self._raw) > 1 and (self._raw_lines > _TAIL_LINES or self._raw_bytes > _TAIL_BYTES):
            _, gone = self._raw.popleft()
            self._raw_lines -= len(gone)
            self._raw_bytes -= sum(map(len, gone))

    def _source_of(self, line: bytes) -> _Source:
        key = line[: line.find(b")", 0, 80) + 1] if line[:1] == b"(" else b""
        found = self._sources.get(key)
        if found is None:
            if b" pid=" not in key or len(self._sources) >= _MOST_SOURCES:
                return self._sources[b""]
            found = self._sources[key] = _Source(neutralise(key.decode("utf-8", "replace")))
        return found

    def _tell(self, raw: bytes) -> None:
        text = self._clean(raw)
        if not text:
            return
        self._on_line(text)
        if self._bars.is_redrawn(text, self._now):
            return
        self._shown.append(text)
        self._grouper.take(text)

    def _clean(self, raw: bytes) -> str:
        text = self._redact(neutralise(raw[:_RAW_LINE_BYTES].decode("utf-8", "replace")).rstrip())
        if len(raw) >= _RAW_LINE_BYTES:
            # The last thing in it may be half a secret. It is shorter than a whole one, and so gone with this.
            return shorten(text[:-LONGEST], cut=True)
        return shorten(text)

    def _tell_dropped(self, before: float) -> None:
        """Tell of the lines that were held back, for processes that were last told of by ``before``."""
        for source in self._sources.values():
            if source.dropped and source.told_at <= before:
                words = f"{source.dropped} lines dropped: the engine wrote more than {LINES_PER_SECOND:g} a second"
                if source.name:
                    words = f"{source.name} {words}"
                self._shown.append(words)
                log.warning("%s", words, extra={"dropped": source.dropped})
                source.dropped, source.told_at = 0, self._now


class _Bars:
    """Progress bars, each of which is shown at its beginning, its end, and now and then."""

    def __init__(self) -> None:
        self._shown: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def is_redrawn(self, line: str, now: float) -> bool:
        """Whether a line only moves a bar that was shown a short time ago."""
        bar = bar_of(line)
        if bar is None:
            return False
        seen = self._shown.get(bar.what)
        if seen is not None and now - seen[0] < _BAR_SECONDS and (bar.percent < 100 or seen[1] == 100):
            return True
        self._shown[bar.what] = now, bar.percent
        self._shown.move_to_end(bar.what)
        if len(self._shown) > _MOST_BARS:
            self._shown.popitem(last=False)
        return False
