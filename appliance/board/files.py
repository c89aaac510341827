"""Reading small files of ``/sys`` and ``/proc`` that may be missing, unreadable or full of nonsense."""

import os
import re

_MOST_BYTES = 64 << 10
_INDEX = re.compile(r"\d+")


def text_of(*parts: str) -> str | None:
    """The stripped text of a file; None if it can't be read.

    A sensor whose device is powered down answers EAGAIN, ENODATA or EIO: an OSError like a missing file.
    """
    try:
        with open(os.path.join(*parts), "rb") as file:
            # Device tree strings end in NUL.
            return file.read(_MOST_BYTES).decode(errors="replace").strip().strip("\0")
    except (OSError, ValueError):
        return None


def number_of(*parts: str) -> int | None:
    """The decimal integer in a file; None if there is none."""
    text = text_of(*parts)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def names_in(*parts: str) -> list[str]:
    """Names in a folder, hwmon2 before hwmon10; empty if it can't be listed."""
    try:
        names = os.listdir(os.path.join(*parts))
    except OSError:
        return []
    return sorted(names, key=lambda name: (_INDEX.sub("", name), [int(digits) for digits in _INDEX.findall(name)]))
