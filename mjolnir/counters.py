"""Step counters in a memory-mapped file: one file a process, one writer, any number of readers.

The engine's worker counts in ``build()``, on the hot path, so a count is one 8-byte store into shared memory:
no lock, no system call, nothing that a stuck engine could hold. A reader maps the same file; aligned 8-byte
loads and stores are single copies on the machines we run on (x86-64, AArch64), so it never sees half a count.

Layout, little-endian, version 1 (offsets in bytes)::

    0    8 s  magic
    8    u64  layout version
    16   u64  pid
    24   u64  start time of the process, in clock ticks since boot (tells a reused pid)
    32   16 s boot id
    48   u64  rank
    56   u64  wall time of creation, ns since the epoch
    64   u64  wall time of the last step, ns since the epoch
    72   u64  group table: sequence number, odd while it is being written
    80   u64  group table: bytes of JSON
    88        reserved
    128  u64[] 64 counters, in the order of COUNTERS
    1024      group table: JSON list of GroupInfo
"""

import contextlib
import errno
import json
import mmap
import os
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mjolnir.errors import CounterFileError
from mjolnir.names import FallbackReason, KernelSource, StepKind

MAGIC = b"MJOLNIR\n"
VERSION = 1
SUFFIX = ".counters"

T5_TOKENS = "t5_tokens"
FALLBACK_TOKENS = "fallback_tokens"

# The order is the file's layout: append, never reorder, or raise VERSION.
COUNTERS: tuple[str, ...] = (
    *(f"t5:{kind}" for kind in StepKind if kind is not StepKind.SPLIT),
    *(f"fallback:{reason}" for reason in FallbackReason),
    *(f"kernels:{source}" for source in KernelSource),
    T5_TOKENS,
    FALLBACK_TOKENS,
    f"t5:{StepKind.SPLIT}",  # came later than those above
)

_HEADER = struct.Struct("<8sQQQ16sQQQQQ")
_LAST_STEP_OFFSET = 64
_SEQUENCE_OFFSET = 72
_COUNTERS_OFFSET = 128
_GROUPS_OFFSET = 1024
_FILE_BYTES = 32768
_GROUPS_BYTES = _FILE_BYTES - _GROUPS_OFFSET
_INDEX = {name: _COUNTERS_OFFSET // 8 + position for position, name in enumerate(COUNTERS)}


@dataclass(frozen=True)
class GroupInfo:
    """One attention group of a worker: the labels of ``mjolnir_group_info``.

    ``reason`` is empty when T5 runs the group's decode steps, else it says why the fallback does.
    """

    group: str
    kv_format: str
    head_size: int
    page_size: int
    fallback: str
    reason: str = ""


@dataclass(frozen=True)
class Snapshot:
    """What one process had counted when its file was read."""

    pid: int
    start_ticks: int
    boot_id: bytes
    rank: int
    created_ns: int
    last_step_ns: int
    counters: dict[str, int]
    groups: tuple[GroupInfo, ...] = field(default=())

    @property
    def identity(self) -> tuple[int, int, bytes]:
        """What tells this process from every other, a later one with the same pid included."""
        return self.pid, self.start_ticks, self.boot_id

    def is_alive(self) -> bool:
        """Whether the process that wrote the file still runs."""
        try:
            return (process_start_ticks(self.pid), boot_id()) == (self.start_ticks, self.boot_id)
        except OSError:
            return False


def process_start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot (field 22 of ``/proc/<pid>/stat``).

    Raises:
        OSError: there is no such process.
    """
    stat = Path(f"/proc/{pid}/stat").read_text()
    # The second field is the command in brackets and may hold spaces and brackets itself.
    return int(stat.rpartition(")")[2].split()[19])


def boot_id() -> bytes:
    """16 bytes that change with every boot of the machine."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


class CounterFile:
    """The writer's side: one object a process.

    Where the directory can't be written the counts go to anonymous memory: an engine must serve even when
    nobody can watch it. ``path`` is None then.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int = 0) -> None:
        pid = os.getpid()
        self.path: Path | None = None
        self.error: str | None = None
        self._map: mmap.mmap
        start, boot = 0, bytes(16)
        try:
            start, boot = process_start_ticks(pid), boot_id()
            _make_private(Path(directory))
            path = Path(directory) / f"{pid}-{time.time_ns()}{SUFFIX}"
            self._map = _create(path)
            self.path = path
        except OSError as error:
            self.error = f"{error.strerror or error}: {directory}"
            self._map = mmap.mmap(-1, _FILE_BYTES)
        # The magic goes in last: a reader that comes too early sees a foreign file, not a half-written one.
        header = _HEADER.pack(bytes(8), VERSION, pid, start, boot, rank, time.time_ns(), 0, 0, 0)
        self._map[: len(header)] = header
        self._map[: len(MAGIC)] = MAGIC
        self._cells = memoryview(self._map).cast("Q")

    def t5_step(self, kind: StepKind, tokens: int) -> None:
        """Count one step of an attention group that runs on T5, and its query tokens."""
        self._add(f"t5:{kind}", 1)
        self._add(T5_TOKENS, tokens)
        self._cells[_LAST_STEP_OFFSET // 8] = time.time_ns()

    def fallback_step(self, reason: FallbackReason, tokens: int) -> None:
        """Count one step of an attention group that runs on the fallback, and its query tokens."""
        self._add(f"fallback:{reason}", 1)
        self._add(FALLBACK_TOKENS, tokens)
        self._cells[_LAST_STEP_OFFSET // 8] = time.time_ns()

    def split_step(self, t5_tokens: int, fallback_tokens: int) -> None:
        """Count one step that ran on both: one step, of T5's kinds, and the query tokens where each was computed."""
        self._add(f"t5:{StepKind.SPLIT}", 1)
        self._add(T5_TOKENS, t5_tokens)
        self._add(FALLBACK_TOKENS, fallback_tokens)
        self._cells[_LAST_STEP_OFFSET // 8] = time.time_ns()

    def kernels(self, source: KernelSource, number: int = 1) -> None:
        """Count kernel variants that were compiled, or loaded from the kernel cache."""
        self._add(f"kernels:{source}", number)

    def set_groups(self, groups: Sequence[GroupInfo]) -> None:
        """Replace the table of attention groups; groups beyond the table's room are left out."""
        text = json.dumps([asdict(group) for group in groups]).encode()
        while len(text) > _GROUPS_BYTES:
            groups = groups[:-1]
            text = json.dumps([asdict(group) for group in groups]).encode()
        sequence = self._cells[_SEQUENCE_OFFSET // 8]
        self._cells[_SEQUENCE_OFFSET // 8] = sequence + 1
        self._map[_GROUPS_OFFSET : _GROUPS_OFFSET + len(text)] = text
        self._cells[_SEQUENCE_OFFSET // 8 + 1] = len(text)
        self._cells[_SEQUENCE_OFFSET // 8] = sequence + 2

    def snapshot(self) -> Snapshot:
        """What has been counted so far."""
        return _parse(self._map, str(self.path))

    def close(self) -> None:
        """Unmap the file and leave it for the supervisor, which folds it into its totals."""
        self._cells.release()
        self._map.close()

    def _add(self, name: str, number: int) -> None:
        self._cells[_INDEX[name]] += number


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read the counters of one process.

    Raises:
        CounterFileError: the file is truncated, foreign or of another version.
        OSError: the file can't be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != _FILE_BYTES:
            raise CounterFileError(f"{path}: {size} bytes, a counters file has {_FILE_BYTES}")
        with mmap.mmap(file.fileno(), _FILE_BYTES, prot=mmap.PROT_READ) as mapped:
            return _parse(mapped, str(path))


def read_all(directory: str | os.PathLike[str]) -> Iterator[tuple[Path, Snapshot | CounterFileError]]:
    """Read every counters file of a directory, in name order; files that vanish meanwhile are passed over."""
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        try:
            yield path, read(path)
        except CounterFileError as error:
            yield path, error
        except FileNotFoundError:
            continue
        except OSError as error:
            yield path, CounterFileError(f"{path}: {error.strerror}")


def _make_private(directory: Path) -> None:
    """Make the directory ours alone; the default one has a name that anyone could have taken first."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"belongs to user {found.st_uid}")


def _create(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Not ftruncate: on a full tmpfs a hole would be a bus error at the first count, amid a step.
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
        return mmap.mmap(descriptor, _FILE_BYTES)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def _parse(mapped: mmap.mmap, name: str) -> Snapshot:
    magic, version, pid, start, boot, rank, created, _, _, _ = _HEADER.unpack_from(mapped)
    if magic != MAGIC:
        raise CounterFileError(f"{name}: not a counters file (or not written yet)")
    if version != VERSION:
        raise CounterFileError(f"{name}: layout version {version}, this reader knows {VERSION}")
    with memoryview(mapped) as view, view.cast("Q") as cells:
        counters = {counter: cells[index] for counter, index in _INDEX.items()}
        last_step = cells[_LAST_STEP_OFFSET // 8]
        groups = _groups(mapped, cells, name)
    return Snapshot(pid, start, boot, rank, created, last_step, counters, groups)


def _groups(mapped: mmap.mmap, cells: memoryview, name: str) -> tuple[GroupInfo, ...]:
    """The group table, or nothing while its writer is in the middle of it (the next reading has it)."""
    before = cells[_SEQUENCE_OFFSET // 8]
    length = min(cells[_SEQUENCE_OFFSET // 8 + 1], _GROUPS_BYTES)
    text = mapped[_GROUPS_OFFSET : _GROUPS_OFFSET + length]
    if before % 2 or before != cells[_SEQUENCE_OFFSET // 8] or not text:
        return ()
    try:
        return tuple(GroupInfo(**group) for group in json.loads(text))
    except (ValueError, TypeError) as error:
        raise CounterFileError(f"{name}: damaged group table ({error})") from None
