"""Totals of the step counters over all engine processes, living and dead. They never go backwards.

A counters file belongs to one process (``mjolnir.counters``). While the process lives its counts are added to the
totals at every reading; once it is dead they are folded in for good and the file is removed.

What a process counted before its engine was ready is no traffic but warm-up, graph capture and self-test: that is
remembered as the process's baseline and taken off. Compiled and loaded kernels are kept whole, because nearly all
of them come from the time before. With tensor parallelism every rank counts the same steps: only rank 0's are
taken.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mjolnir import counters
from mjolnir.counters import GroupInfo, Snapshot
from mjolnir.errors import CounterFileError
from mjolnir.names import KernelSource

log = logging.getLogger(__name__)

_KERNELS = tuple(f"kernels:{source}" for source in KernelSource)
_STEPS = tuple(name for name in counters.COUNTERS if name not in _KERNELS)

Identity = tuple[int, int, bytes]


class Tally:
    """Totals of the counters files in one directory.

    Attributes:
        errors: how often a file could not be read.
        groups: attention groups as the engine last described them.
    """

    def __init__(self, directory: Path) -> None:
        self.errors = 0
        self.groups: tuple[GroupInfo, ...] = ()
        self._directory = directory
        self._folded: Counter[str] = Counter()
        self._done: set[Path] = set()
        self._baselines: dict[Identity, dict[str, int]] = {}
        self._serving = False

    def mark_ready(self) -> None:
        """The engine is ready: what its processes have counted until now was not traffic."""
        for _, snapshot in self._snapshots():
            if snapshot.is_alive():
                self._baselines.setdefault(snapshot.identity, snapshot.counters)
        self._serving = True

    def mark_gone(self) -> None:
        """The engine's processes have ended: fold them in; what comes next is a start again."""
        self.totals()
        self._serving = False
        self._baselines.clear()

    def totals(self) -> dict[str, int]:
        """Every counter of ``mjolnir.counters.COUNTERS``, over all processes since the supervisor's start."""
        living: Counter[str] = Counter()
        for path, snapshot in self._snapshots():
            if snapshot.is_alive():
                living.update(self._share(snapshot))
                self._describe(snapshot)
            else:
                self._fold(path)
        return {name: self._folded[name] + living[name] for name in counters.COUNTERS}

    def _fold(self, path: Path) -> None:
        # Read again: between the first reading and its death the process may have counted on.
        snapshot = self._read(path)
        if snapshot is None:
            return
        self._folded.update(self._share(snapshot))
        self._describe(snapshot)
        self._done.add(path)  # even when the file can't be removed it must not count twice
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s can't be removed: %s", path, error.strerror)

    def _share(self, snapshot: Snapshot) -> dict[str, int]:
        """What a process adds to the totals."""
        share = {name: snapshot.counters[name] for name in _KERNELS}
        baseline = self._baselines.get(snapshot.identity)
        if baseline is None and self._serving:
            baseline = self._baselines[snapshot.identity] = {}  # came after ready: all of it is traffic
        if snapshot.rank == 0 and baseline is not None:
            share |= {name: max(0, snapshot.counters[name] - baseline.get(name, 0)) for name in _STEPS}
        return share

    def _describe(self, snapshot: Snapshot) -> None:
        if snapshot.rank == 0 and snapshot.groups:
            self.groups = snapshot.groups

    def _snapshots(self) -> Iterator[tuple[Path, Snapshot]]:
        for path in sorted(self._directory.glob(f"*{counters.SUFFIX}")):
            if path not in self._done:
                snapshot = self._read(path)
                if snapshot is not None:
                    yield path, snapshot

    def _read(self, path: Path) -> Snapshot | None:
        try:
            return counters.read(path)
        except FileNotFoundError:
            return None
        except (CounterFileError, OSError, ValueError, TypeError) as error:
            # ValueError and TypeError: a group table that is no JSON, or not of our shape.
            log.debug("%s can't be read: %s", path, error)
            self.errors += 1
            return None


def remove_leftovers(base: Path) -> None:
    """Remove the counters that supervisors which no longer run left under ``base``."""
    for folder in base.glob("[0-9]*"):
        if not folder.name.isdecimal() or Path("/proc", folder.name).exists():
            continue
        try:
            for file in folder.glob(f"*{counters.SUFFIX}"):
                file.unlink(missing_ok=True)
            folder.rmdir()
        except OSError as error:
            log.info("%s stays: %s", folder, error.strerror)
