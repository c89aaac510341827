"""Process trees on Linux: who descends from whom, and how to be sure that nobody is left. Standard library only.

Engine processes start sessions of their own, so a process group is not enough to find them; and a parent that dies
first hands its children to init. A subreaper (``prctl(2)``) inherits them instead, which keeps every descendant
in its tree.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_KILL_SECONDS = 5.0
_COMPILERS = frozenset(
    (
        *("nvcc", "cicc", "ptxas", "ptxas-blackwell", "nvlink", "fatbinary", "cudafe++", "ninja", "cmake"),
        *("gcc", "g++", "cc", "c++", "cc1", "cc1plus", "clang", "clang++", "as", "ld", "ld.lld", "lld", "collect2"),
    )
)

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make this process inherit its orphaned descendants.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """Have the kernel send this process a signal when the process ``parent`` ends; ends at once if it has.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended between fork and the call above
        os.kill(os.getpid(), number)


def descendants(root: int) -> list[int]:
    """Every process below ``root``, zombies left out."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            parent, state = _parent_and_state(int(entry.name))
            if parent is not None and state != "Z":
                children[parent].append(int(entry.name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children[frontier.pop()]
        found.extend(below)
        frontier.extend(below)
    return found


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that are gone already are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_descendants(root: int, grace: float) -> list[int]:
    """End everything below ``root``: SIGTERM, ``grace`` seconds, then SIGKILL until nothing is left.

    Blocks. Returns the processes that even SIGKILL did not end within five seconds (stuck in the kernel).
    """
    return end(lambda: descendants(root), grace)


def end(remaining: Callable[[], list[int]], grace: float) -> list[int]:
    """End the processes that ``remaining`` lists, until it lists none: SIGTERM, ``grace`` seconds, SIGKILL.

    Blocks. Returns the processes that even SIGKILL did not end within five seconds (stuck in the kernel).
    """
    if grace > 0:
        signal_all(remaining(), signal.SIGTERM)
        if _wait_none(remaining, grace):
            return []
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        # Again each round: one of them may have forked between the listing and the signal.
        pids = remaining()
        workers = [pid for pid in pids if not _is_resource_tracker(pid)]
        signal_all(workers if left > _KILL_SECONDS / 2 else pids, signal.SIGKILL)
        if _wait_none(remaining, 0.1):
            return []
    return remaining()


def has_variable(pid: int, assignment: str) -> bool:
    """Whether a process was started with ``NAME=value`` in its environment."""
    return assignment.encode() in _environment(pid)


def variable(pid: int, name: str) -> str | None:
    """Value of a variable with which a process was started."""
    prefix = f"{name}=".encode()
    value = next((entry.removeprefix(prefix) for entry in _environment(pid) if entry.startswith(prefix)), None)
    return None if value is None else os.fsdecode(value)


def title(pid: int) -> str:
    """What a process calls itself: its command line, or its name where it has none; empty when it is gone."""
    for source in ("cmdline", "comm"):
        try:
            with open(f"/proc/{pid}/{source}", "rb") as file:
                text = file.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            return ""
        if text:
            return text[:200]
    return ""


def name(pid: int) -> str:
    """The kernel's name of a process, at most 15 characters; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return ""


def compilers(root: int) -> set[str]:
    """Names of the compilers that run below ``root``: just-in-time builds of CUDA, Triton and C++ code."""
    return {found for found in map(name, descendants(root)) if found in _COMPILERS}


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # gone, or another user's
        return []


def _is_resource_tracker(pid: int) -> bool:
    """Whether this is the process by which Python's multiprocessing removes the shared memory of the dead.

    It ends by itself once it has done so; killing it would leave hundreds of megabytes in ``/dev/shm``.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _wait_none(remaining: Callable[[], list[int]], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        pids = remaining()
        for pid in pids:
            # Our own children stay zombies until somebody asks for them. By number: a waitpid(-1) here would
            # take the exit status of a child that somebody else waits for.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not pids:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)  # nothing tells that a set of others' children, which may still fork, is empty


def _parent_and_state(pid: int) -> tuple[int | None, str]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the command in brackets and may hold spaces and brackets itself.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return None, ""
    return int(parent), state.decode()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
