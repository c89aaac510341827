"""From a YAML file to a profile.

Only the plain part of YAML is read. Anchors and aliases are refused, because ten lines of them unfold to gigabytes; a
key that stands twice is refused, because YAML would drop one of the two without a word.
"""

import difflib
import math
import os
import stat
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from appliance.profiles.errors import ProfileError
from appliance.profiles.schema import Needs, Profile, Speculation

MOST_BYTES = 64 << 10
_DEEPEST = 16
_SHOWN = 80  # characters of a wrong value
_PARTS: dict[str, type[BaseModel]] = {"speculation": Speculation, "needs": Needs}

Lines = dict[tuple[str, ...], int]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, without deep nesting, and with each key once."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not accepted", problem_mark=event.start_mark)
        if self.depth >= _DEEPEST:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem="a key has to be a plain text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def load(file: Path) -> Profile:
    """The profile in a file.

    Raises:
        ProfileError: it can't be read, is not YAML or not a profile; one line with file, line, key and value.
    """
    data, lines = _read(_text(file), file)
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        raise ProfileError(_one_line(error, file, lines)) from None
    if profile.name != file.stem:
        line = lines.get(("name",), 1)
        raise ProfileError(f"{file}:{line}: name={profile.name!r}: accepted: {file.stem}, as its file is called")
    return profile


def _text(file: Path) -> str:
    try:
        # Opening a named pipe would wait for its writer otherwise.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ProfileError(f"{file}: not a regular file")
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{file}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise ProfileError(f"{file}: larger than {MOST_BYTES >> 10} KiB; accepted: a profile of a few lines")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProfileError(f"{file}: not UTF-8 text") from None


def _read(text: str, file: Path) -> tuple[dict[str, Any], Lines]:
    """The document, and on which line each of its keys stands."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark else ""
        raise ProfileError(f"{file}{where}: not a profile's YAML: {' '.join(str(error.problem).split())}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ProfileError(f"{file}: not a profile's YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict):
        raise ProfileError(f"{file}: not a profile; accepted: lines of key: value")
    return data, _lines(node, ())


def _lines(node: yaml.Node, path: tuple[str, ...]) -> Lines:
    found: Lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            found[here] = key.start_mark.line + 1
            found |= _lines(value, here)
    return found


def _one_line(error: ValidationError, file: Path, lines: Lines) -> str:
    """The first problem of a validation, as: file, line, key, value, what is accepted."""
    # A misspelt key explains why another one is missing.
    problem = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    path = tuple(str(part) for part in problem["loc"])
    line = next((lines[path[:size]] for size in range(len(path), 0, -1) if path[:size] in lines), 1)
    key = ".".join(path)
    where = f"{file}:{line}: {key}"
    if problem["type"] == "extra_forbidden":
        known = _PARTS[path[0]].model_fields if len(path) > 1 and path[0] in _PARTS else Profile.model_fields
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(known)}"
        return f"{where}: there is no such key; {hint}"
    if problem["type"] == "missing":
        return f"{file}: {key} is missing"
    accepted = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if problem["type"] == "string_pattern_mismatch":
        accepted = f"letters, digits and a few signs: {problem['ctx']['pattern']}"
    shown = _shown(problem["input"])
    return f"{where}={shown}: accepted: {accepted}" if shown else f"{where}: accepted: {accepted}"


def _shown(value: object) -> str:
    """A scalar that is wrong; a mapping is named by its line and key, and may hold what should not be shown."""
    if not isinstance(value, str | int | float | bool | None) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        return ""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
