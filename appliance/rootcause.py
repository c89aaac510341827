"""Why an engine died: the first exception of its log, in one line. Pure.

vLLM's processes report one failure several times: the worker that failed writes its traceback, then the engine
core that lost it, then the API server with "Engine core initialization failed. See root cause above". The first
traceback is the cause and the last one says nothing.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# "(EngineCore pid=12) ERROR 12-01 04:06:38 [core.py:99] ", in front of every line of a logged traceback.
_PREFIX = re.compile(
    r"^(?:\((?P<process>[^()]*?pid=\d+)\)\s?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
_TRACEBACK = "Traceback (most recent call last):"
# "package.module.SomeError: what happened" or "SomeError" alone.
_EXCEPTION = re.compile(r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ?(?P<message>.*))?$")
_USAGE_ERROR = re.compile(r"^(?:vllm|api_server\.py|entry\.py)[\w ]*: error: (?P<message>.*)$")
_NATIVE_CRASH = re.compile(
    r"terminate called after throwing|Fatal Python error|Segmentation fault|what\(\):|"
    r"error while loading shared libraries|No module named|CUDA error|out of memory|core dumped|"
    r"(?:exited|died) unexpectedly"
)
_LONGEST = 400

# Exceptions that only report that another process failed.
_SAYS_NOTHING = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "EngineCore encountered an issue",
    "KeyboardInterrupt",
    "SystemExit",
    "CancelledError",
    "BrokenPipeError",
)
# A second try with the same settings meets these again. Memory is the exception: the processes of an engine that
# just ended may still hold it, and vLLM reports that as a ValueError.
_SETTINGS_ERRORS = {
    "ValidationError",
    "ValueError",
    "TypeError",
    "KeyError",
    "AttributeError",
    "NotImplementedError",
    "ImportError",
    "ModuleNotFoundError",
    "PackageNotFoundError",
    "FileNotFoundError",
    "ConfigurationError",
    "ScalesError",
    "SafetensorError",
}
_TRANSIENT = re.compile(r"memory|address already in use|timed? ?out|connection", re.IGNORECASE)


@dataclass(frozen=True)
class RootCause:
    """What ended an engine.

    Attributes:
        text: one line for the user.
        settings: whether the settings or the model are to blame, so that another start fails alike.
    """

    text: str
    settings: bool = False


def find(lines: Iterable[str]) -> RootCause | None:
    """The first exception of a log that tells something, else the first line of a native crash."""
    log = list(lines)
    fallback: RootCause | None = None
    for index, line in enumerate(log):
        process, text = _strip(line)
        if text.strip() == _TRACEBACK:
            cause = _exception(log, index, process)
            if cause is not None:
                return cause
        usage = _USAGE_ERROR.match(text)
        if usage:
            return RootCause(_clip(usage["message"]), settings=True)
        if fallback is None and _NATIVE_CRASH.search(text):
            fallback = RootCause(_clip(text))
    return fallback


def _exception(log: list[str], start: int, process: str | None) -> RootCause | None:
    """The exception under the traceback that starts at a line; lines of other processes are passed over."""
    rest = [text for other, text in map(_strip, log[start + 1 :]) if other == process]
    for index, text in enumerate(rest):
        if not text.strip() or text[0].isspace():
            continue  # a frame, its source, or an empty line
        match = _EXCEPTION.match(text.strip())
        if match is None:
            return None  # the traceback broke off
        name = match["name"].rpartition(".")[2]
        message = (match["message"] or "").strip()
        if any(word in text for word in _SAYS_NOTHING):
            return None
        if name == "ValidationError":
            message = _validation_message(rest[index + 1 :]) or message
        told = f"{name}: {message}" if message else name
        return RootCause(_clip(told), name in _SETTINGS_ERRORS and not _TRANSIENT.search(message))
    return None


def _validation_message(rest: list[str]) -> str:
    """Pydantic's message stands in the lines under "1 validation error for X"."""
    for text in rest[:6]:
        if text[:1].isspace() and text.strip():
            return text.strip().removeprefix("Value error, ").partition(" [type=")[0]
    return ""


def _strip(line: str) -> tuple[str | None, str]:
    """Process that wrote a line, and the line without vLLM's prefixes."""
    match = _PREFIX.match(line)
    if match is None:
        return None, line
    return match["process"], line[match.end() :].rstrip()


def _clip(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 1] + "…"
