"""One valid page of Prometheus text out of two: ours and the engine's. Pure."""

import re
from collections.abc import Iterator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_HEADER = re.compile(rf"# (?:HELP|TYPE) (?P<name>{_NAME})(?: .*)?")
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf"(?P<name>{_NAME})(?:\{{(?:{_LABEL}(?:,{_LABEL})*,?)?\}})? +"
    r"(?:[+-]?(?:Inf|NaN|[0-9.]+(?:[eE][+-]?[0-9]+)?))(?: -?[0-9]+)?"
)
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created", "_info")
# Of the engine's Python process; our own page has families of these names, or could.
_DROPPED = ("python_", "process_")


class PageError(ValueError):
    """A page that is not Prometheus text."""


def merge(own: str, engine: str) -> str:
    """Our page, and after it those of the engine's families that it does not have.

    Raises:
        PageError: the engine's page is not valid.
    """
    taken = {name for name, _ in families(own)}
    kept: list[str] = []
    for name, lines in families(engine):
        if not name.startswith(_DROPPED) and name not in taken:
            taken.add(name)
            kept.extend(lines)
    return own + "".join(line + "\n" for line in kept)


def families(page: str) -> Iterator[tuple[str, list[str]]]:
    """The families of a page with their lines, in order.

    Raises:
        PageError: a line that is neither comment nor sample.
    """
    family, lines = "", list[str]()
    for line in page.splitlines():
        name = _name(line)
        if name is None:
            continue
        if not lines or not _belongs(name, family, line):
            if lines:
                yield family, lines
            family, lines = name, []
        lines.append(line)
    if lines:
        yield family, lines


def _name(line: str) -> str | None:
    """Name of the family or sample that a line is about; None for empty lines and free comments."""
    if not line.strip():
        return None
    if line.startswith("#"):
        header = _HEADER.fullmatch(line)
        return header["name"] if header else None
    sample = _SAMPLE.fullmatch(line)
    if sample is None:
        raise PageError(f"not a line of Prometheus text: {line[:200]!r}")
    return sample["name"]


def _belongs(name: str, family: str, line: str) -> bool:
    """Whether a line goes on with a family: HELP and TYPE by their exact name, samples with a suffix too."""
    if name == family:
        return True
    return not line.startswith("#") and any(name == family + suffix for suffix in _SUFFIXES)
