"""One appliance for one folder of counters: a second one would end the first one's engine as an orphan.

The lock is the kernel's, on the folder itself (``flock``): it is gone with its holder, however that ended, and takes no
file. Caches may be shared between appliances, vLLM's are made for it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from appliance.errors import SettingsError


@contextlib.contextmanager
def sole_user(stats_dir: Path) -> Iterator[None]:
    """Hold the folder of the counters while the context lasts.

    Raises:
        SettingsError: another appliance holds it, or it can't be made.
    """
    try:
        stats_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(stats_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(stats_dir, str(error.strerror)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _unusable(stats_dir, f"in use by {_holder(stats_dir)}") from None
        yield
    finally:
        os.close(descriptor)


def _holder(stats_dir: Path) -> str:
    """Who it is: an appliance keeps its counters in a folder named after its process."""
    running = sorted(name for name in os.listdir(stats_dir) if name.isdecimal() and Path("/proc", name).exists())
    return f"the appliance with process id {running[0]}" if running else "another appliance"


def _unusable(stats_dir: Path, why: str) -> SettingsError:
    accepted = "another folder (--stats-dir or MJOLNIR_STATS_DIR), or one appliance at a time"
    return SettingsError(f"stats_dir={str(stats_dir)!r}: {why}; accepted: {accepted}")
