"""Patch files: parsing, applying with no fuzz, and writing them back byte for byte.

A patch file is a git mailbox: a header (who, what, why), then one ``diff --git`` section a file with full
blob ids. Only changes of existing ``.py`` files of vLLM can be told; everything else is refused by line.
Standard library only.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import NoReturn

from appliance.errors import PatchError

CONTEXT_LINES = 3
NO_NEWLINE = b"\\ No newline at end of file"

_DIFF = re.compile(rb"diff --git a/(\S+) b/(\S+)")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40}) 100644")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")

Lines = tuple[bytes, ...]
Texts = dict[str, bytes]


def blob_id(data: bytes) -> str:
    """The id that git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Hunk:
    """One replacement: these old lines at this line (from 1), those new ones instead."""

    old_start: int
    old: Lines
    new_start: int
    new: Lines


@dataclass(frozen=True)
class FilePatch:
    """All hunks of one file, its blob ids before and after them, and the section of the patch as it was read."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]
    section: bytes = field(default=b"", compare=False, repr=False)

    def reversed(self) -> "FilePatch":
        """The change that takes this one back."""
        hunks = tuple(Hunk(h.new_start, h.new, h.old_start, h.old) for h in self.hunks)
        return FilePatch(self.path, self.after, self.before, hunks)

    def apply(self, text: bytes) -> bytes:
        """The changed text: every hunk exactly at its line, no fuzz and no offset.

        Raises:
            PatchError: the text is not the one that the change was made for, or the hunks don't give the
                text that the ids promise.
        """
        if blob_id(text) != self.before:
            raise PatchError(f"{self.path}: expected blob {self.before}, found {blob_id(text)}")
        lines = split_lines(text)
        result: list[bytes] = []
        position = 0
        for hunk in self.hunks:
            # An empty side names the line before it, as in `@@ -0,0 +1 @@`.
            index = hunk.old_start - 1 if hunk.old else hunk.old_start
            if index < position or tuple(lines[index : index + len(hunk.old)]) != hunk.old:
                raise PatchError(f"{self.path}: the hunk for line {hunk.old_start} does not fit there")
            result += lines[position:index] + list(hunk.new)
            position = index + len(hunk.old)
        patched = b"".join(result + lines[position:])
        if blob_id(patched) != self.after:
            raise PatchError(f"{self.path}: the hunks give blob {blob_id(patched)}, but the patch names {self.after}")
        return patched


@dataclass(frozen=True)
class Patch:
    """One parsed patch file."""

    path: Path
    header: bytes
    files: tuple[FilePatch, ...]
    changed_lines: int

    def without(self, paths: Collection[str]) -> "Patch":
        """This patch with the sections of these files left out."""
        return replace(self, files=tuple(file for file in self.files if file.path not in paths))

    def field(self, name: str) -> str:
        """The value of ``Name: value`` in the header, continuation lines joined; empty when missing."""
        pattern = rf"^{re.escape(name)}:[ \t]*(.*(?:\n[ \t]+.*)*)"
        match = re.search(pattern, self.header.decode(), re.MULTILINE)
        return " ".join(match.group(1).split()) if match else ""

    def apply(self, texts: Mapping[str, bytes]) -> Texts:
        """The texts with this patch in them.

        Raises:
            PatchError: a text is not the one that the patch was made for.
        """
        return self._changed(texts, self.files)

    def revert(self, texts: Mapping[str, bytes]) -> Texts:
        """The texts without this patch; the inverse of :meth:`apply`."""
        return self._changed(texts, [file.reversed() for file in self.files])

    def _changed(self, texts: Mapping[str, bytes], files: Sequence[FilePatch]) -> Texts:
        try:
            return {**texts, **{file.path: file.apply(texts[file.path]) for file in files}}
        except PatchError as error:
            raise PatchError(f"{self.path}: {error}") from error


def split_lines(text: bytes) -> list[bytes]:
    r"""Lines with their ends; only ``\n`` ends one, unlike ``bytes.splitlines``."""
    return [line for line in re.split(rb"(?<=\n)", text) if line]


class _Reader:
    """The lines of one patch file, with errors that name file and line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise PatchError(f"{path}: can't be read: {error.strerror}") from error
        if self.lines.pop() != b"":
            raise PatchError(f"{path}:{len(self.lines) + 1}: the last line has no end; the file is truncated")
        self.number = 0

    def peek(self) -> bytes | None:
        return self.lines[self.number] if self.number < len(self.lines) else None

    def take(self, wanted: str) -> bytes:
        line = self.peek()
        if line is None:
            raise PatchError(f"{self.path}:{self.number + 1}: the file ends where {wanted} must be")
        self.number += 1
        return line

    def fail(self, what: str) -> NoReturn:
        raise PatchError(f"{self.path}:{self.number}: {what}")

    def match(self, pattern: re.Pattern[bytes], wanted: str) -> re.Match[bytes]:
        line = self.take(wanted)
        match = pattern.match(line)
        if match is None:
            self.fail(f"expected {wanted}, found {line.decode(errors='replace')[:60]!r}")
        return match


def parse_patch(path: Path) -> Patch:
    """Read one patch file; one that has a header only is taken as empty.

    Raises:
        PatchError: it can't be read or is malformed; names file, line and what is wrong.
    """
    reader = _Reader(path)
    header: list[bytes] = []
    while (line := reader.peek()) is not None and not line.startswith(b"diff --git "):
        header.append(reader.take("a header line") + b"\n")
    _check_header(reader, b"".join(header))
    files: list[FilePatch] = []
    while reader.peek() is not None:
        files.append(_parse_file(reader))
        if files[-1].path in {file.path for file in files[:-1]}:
            reader.fail(f"{files[-1].path} has two sections")
    changed = sum(line[:1] in (b"+", b"-") for line in reader.lines[len(header) :]) - 2 * len(files)
    return Patch(path, b"".join(header), tuple(files), changed)


def _check_header(reader: _Reader, header: bytes) -> None:
    try:
        text = header.decode()
    except UnicodeDecodeError as error:
        raise PatchError(f"{reader.path}:1: the header is not UTF-8: {error}") from error
    if not re.match(r"From [0-9a-f]{40} ", text):
        raise PatchError(f"{reader.path}:1: expected `From <40 hex digits> ...`: not a git mailbox")
    for name in ("From", "Subject"):
        if not re.search(rf"^{name}: \S", text, re.MULTILINE):
            raise PatchError(f"{reader.path}:1: the header has no `{name}:`")


def _parse_file(reader: _Reader) -> FilePatch:
    start = reader.number
    diff = reader.match(_DIFF, "`diff --git a/PATH b/PATH`")
    path = diff.group(1).decode()
    if diff.group(2) != diff.group(1):
        reader.fail("renames are outside this queue")
    if not re.fullmatch(r"vllm(/\w+)+\.py", path):
        reader.fail(f"{path} is outside this queue: only .py files of vllm/")
    index = reader.match(_INDEX, "`index <40 hex>..<40 hex> 100644` (git's --full-index, a changed file)")
    reader.match(re.compile(re.escape(f"--- a/{path}".encode()) + b"$"), f"`--- a/{path}`")
    reader.match(re.compile(re.escape(f"+++ b/{path}".encode()) + b"$"), f"`+++ b/{path}`")
    hunks = [_parse_hunk(reader)]
    while (line := reader.peek()) is not None and not line.startswith(b"diff --git "):
        hunks.append(_parse_hunk(reader))
    section = b"".join(line + b"\n" for line in reader.lines[start : reader.number])
    return FilePatch(path, index.group(1).decode(), index.group(2).decode(), tuple(hunks), section)


def _parse_hunk(reader: _Reader) -> Hunk:
    match = reader.match(_HUNK, "`@@ -LINE,COUNT +LINE,COUNT @@`")
    old_start, old_count, new_start, new_count = (int(group or 1) for group in match.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        line = reader.take(f"a hunk line ({old_count - len(old)} old, {new_count - len(new)} new to come)")
        sides = {b" ": (old, new), b"-": (old,), b"+": (new,)}.get(line[:1])
        if sides is None:
            reader.fail("expected a hunk line that starts with space, - or +; the hunk is truncated")
        ended = reader.peek() != NO_NEWLINE
        for side in sides:
            side.append(line[1:] + b"\n" * ended)
        if len(old) > old_count or len(new) > new_count:
            reader.fail(f"the hunk has more lines than the {old_count} old and {new_count} new ones it names")
        if not ended:
            reader.take("the mark")
    return Hunk(old_start, tuple(old), new_start, tuple(new))


def render_diff(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> bytes:
    """The ``diff --git`` sections from one set of texts to another, in the order of their paths."""
    return b"".join(render_sections(old, new).values())


def render_sections(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> dict[str, bytes]:
    """As :func:`render_diff`, each section by its path."""
    return {path: _render_file(path, old[path], new[path]) for path in sorted(new) if new[path] != old[path]}


def _render_file(path: str, old: bytes, new: bytes) -> bytes:
    head = f"diff --git a/{path} b/{path}\nindex {blob_id(old)}..{blob_id(new)} 100644\n--- a/{path}\n+++ b/{path}\n"
    return head.encode() + b"".join(_render_hunks(split_lines(old), split_lines(new)))


def _render_hunks(old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[bytes]:
    # autojunk would make the result depend on how often a line occurs in a long file.
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        first, last = group[0], group[-1]
        spans = _span(first[1], last[2]), _span(first[3], last[4])
        yield f"@@ -{spans[0]} +{spans[1]} @@\n".encode()
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from _marked(b" ", old[i1:i2])
            else:
                yield from _marked(b"-", old[i1:i2])
                yield from _marked(b"+", new[j1:j2])


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line if line.endswith(b"\n") else mark + line + b"\n" + NO_NEWLINE + b"\n"


def _span(start: int, stop: int) -> str:
    """A line range as git writes it: a length of 1 is left out, an empty range named by the line before."""
    length = stop - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"
