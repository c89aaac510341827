"""One line of the engine's log: what it says, who wrote it, how grave it is. Pure.

vLLM writes ``(EngineCore pid=12) ERROR 12-01 04:06:38 [core.py:99] text``, and repeats all before the text on every
line of a message. Its uvicorn writes ``(APIServer pid=10) INFO:     text``, PyTorch's C++ ``[W1201 04:06:38.1 x.cpp:9]
text``, an uncaught exception and a progress bar the process alone or nothing.
"""

import logging
import re
from dataclasses import dataclass

MOST_CHARACTERS = 8192  # of a line that is shown
CUT = " … (cut)"
TRACEBACK = "Traceback (most recent call last):"

_HEADER = re.compile(
    r"^(?:\((?P<process>[^()]{1,64}?) pid=(?P<pid>\d{1,10})\)\s?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
    r"(?: \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[(?P<source>[^\]]{0,200})\] ?|:\s{1,8}))?"
)
_NATIVE_LEVEL = re.compile(r"^(?:\[rank\d+\]:\s?)?\[(?P<letter>[IWEF])\d{4} ")
_NATIVE = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
_WARNING = re.compile(r"^\S{1,400}:\d{1,6}: \w{0,80}Warning: ")
_CRASH = re.compile(r"^(?:Fatal Python error|Segmentation fault|terminate called after throwing|\s*what\(\): )")
_LEVELS = logging.getLevelNamesMapping()

# Colours and other well-formed control sequences go; what else could move a terminal's cursor is spelled out.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_PROGRESS = re.compile(r"(?P<what>[^\r\n]{0,200}?)(?P<percent>\d{1,3})%(?:\s{0,4}\w{0,20}\s{0,4})\|")


@dataclass(frozen=True, slots=True)
class EngineLine:
    """A line taken apart.

    Attributes:
        process: name of the engine's process; empty where the line has none.
        pid: its process id as the engine tells it, which in a container is the container's.
        level: severity as in ``logging``; None where the line has none.
        source: file and line of the program.
        header: all of the line before ``text``.
        text: what it says.
    """

    process: str
    pid: int | None
    level: int | None
    source: str
    header: str
    text: str

    @property
    def begins_traceback(self) -> bool:
        """Whether a traceback's frames follow."""
        return self.text.strip() == TRACEBACK


def parse(line: str) -> EngineLine:
    """Take a line apart; one that is not known is all text."""
    match = _HEADER.match(line)
    if match is None:  # every part is optional: it always matches
        return EngineLine("", None, None, "", "", line)
    text = line[match.end() :]
    level = _LEVELS[match["level"]] if match["level"] else _level_without_name(text)
    pid = int(match["pid"]) if match["pid"] else None
    return EngineLine(match["process"] or "", pid, level, match["source"] or "", match[0], text)


def _level_without_name(text: str) -> int | None:
    native = _NATIVE_LEVEL.match(text)
    if native:
        return _NATIVE[native["letter"]]
    if text.startswith(TRACEBACK) or _CRASH.match(text):
        return logging.ERROR
    return logging.WARNING if _WARNING.match(text) else None


def neutralise(text: str) -> str:
    r"""The text without control sequences; other control characters, line ends too, as ``\xNN`` or ``\uNNNN``.

    That includes what turns the direction of text around, by which a line could show something else than it says.
    """
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(_spelled, _SEQUENCE.sub("", text))


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shorten(text: str, *, cut: bool = False) -> str:
    """The text, cut with a mark where it is longer than a shown line may be; ``cut``: some is missing already."""
    if len(text) <= MOST_CHARACTERS and not cut:
        return text
    return text[: MOST_CHARACTERS - len(CUT)] + CUT


@dataclass(frozen=True, slots=True)
class Bar:
    """One picture of a progress bar: of what, and how far (percent)."""

    what: str
    percent: int


def bar_of(line: str) -> Bar | None:
    """The progress bar on a line (tqdm's ``what: 50%|###  | 1/2``), if it is one."""
    match = _PROGRESS.match(line[:400])
    if match is None or int(match["percent"]) > 100:
        return None
    return Bar(re.sub(r"\d+", "0", match["what"]), int(match["percent"]))
