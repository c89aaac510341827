"""Engine processes that a dead supervisor left: they hold memory, and nobody else will end them.

An engine's processes carry their supervisor's counters folder, ``STATS_DIR/PID``, in their environment. Whoever holds
the lock on ``STATS_DIR`` (``appliance.instance``) is its only supervisor, so before its first engine starts every
process with such a mark is an orphan, also one that now descends from it because it adopts orphans.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from appliance.processes import end, title, variable
from mjolnir.names import STATS_DIR_VARIABLE

log = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Orphan:
    """A process that was left behind."""

    pid: int
    title: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.title} ({self.pid})"


def find(stats_dir: Path) -> list[Orphan]:
    """Processes of this user that belong to an engine under ``stats_dir``."""
    own = {os.getpid(), os.getppid()}
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    return [Orphan(pid, title(pid)) for pid in pids if pid not in own and _is_engine(pid, stats_dir)]


def end_all(stats_dir: Path) -> list[Orphan]:
    """End them: SIGTERM, two seconds, SIGKILL; returns those that were found. Blocks."""
    found = find(stats_dir)
    for orphan in found:
        log.warning("%s was left by an appliance that has died; ending it", orphan)
    stuck = end(lambda: [orphan.pid for orphan in find(stats_dir)], _GRACE_SECONDS) if found else []
    if stuck:
        log.error("processes that SIGKILL does not end, and that may hold memory: %s", stuck)
    return found


def _is_engine(pid: int, stats_dir: Path) -> bool:
    value = variable(pid, STATS_DIR_VARIABLE)
    if value is None or not Path(value).name.isdecimal() or Path(value).parent != stats_dir:
        return False
    try:
        # A container may have the same path for a folder of its own.
        return os.path.samestat(os.stat(f"/proc/{pid}/root{stats_dir}"), os.stat(stats_dir))
    except OSError:
        return False
