"""Memory from ``/proc/meminfo`` (kernel documentation, filesystems/proc: values are in KiB)."""

from appliance.board.files import text_of
from appliance.board.reading import Memory


def memory(root: str) -> Memory:
    """The machine's memory in bytes; in a container too, where this file is the host's."""
    values: dict[str, int] = {}
    for line in (text_of(root, "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            values[name] = int(words[0]) << 10
    return Memory(
        total=values.get("MemTotal"),
        free=values.get("MemFree"),
        available=values.get("MemAvailable"),
        cached=values.get("Cached"),
    )
