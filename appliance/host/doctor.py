"""`mjolnir doctor`: what of this machine fits the appliance, each finding with its fix.

The file tree's root can be a recorded one. A check that can't look says ``unknown``: a laptop has no nvpmodel.
"""

import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance.board.files import names_in, text_of
from appliance.board.jetson import identity, power_mode
from appliance.board.memory import memory
from appliance.board.sysfs import clocks, sensors
from appliance.errors import ModelError
from appliance.modelcheck import check_model

GIB = 1 << 30
DISK_WARN_BYTES = 100 * GIB  # the image, one 70 GB model, caches
AVAILABLE_WARN_BYTES = 16 * GIB
STUCK_HZ = 300_000_000  # field report: CPUs at 242 MHz after an over-current event
EARLIEST_CLOCK = 1_767_225_600  # 2026-01-01: a board without a battery starts in 1970, and no certificate is valid


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was seen, and what to do unless it is fine."""

    name: str
    level: Level
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Place:
    """Where to look: root of the file tree, the appliance's address, its model; ``now`` is in seconds since 1970."""

    root: str = "/"
    host: str = "127.0.0.1"
    port: int = 8000
    model: str = ""
    now: float = 0.0


def board_findings(place: Place) -> Iterator[Finding]:
    """Everything that needs no container runtime."""
    for check in _CHECKS:
        yield check(place)


def _jetpack(place: Place) -> Finding:
    found = identity(place.root)
    if not found.l4t:
        return Finding("jetpack", Level.UNKNOWN, "no /etc/nv_tegra_release: not a Jetson", "use `--profile cpu`")
    seen = f"{found.model or 'Jetson'}, L4T {found.l4t}, JetPack {found.jetpack or 'not known'}"
    if int(found.l4t.split(".")[0]) < 38:
        return Finding("jetpack", Level.FAIL, seen, "flash JetPack 7.0 or newer: older ones know no Thor")
    return Finding("jetpack", Level.OK, seen)


def _driver(place: Place) -> Finding:
    text = text_of(place.root, "proc/driver/nvidia/version") or ""
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if match:
        return Finding("gpu driver", Level.OK, f"NVIDIA {match[1]}")
    return Finding("gpu driver", Level.UNKNOWN, "no NVIDIA driver is loaded", "on a Thor: `sudo modprobe nvidia`")


def _power(place: Place) -> Finding:
    mode = power_mode(place.root)
    if mode is None:
        return Finding("power mode", Level.UNKNOWN, "nvpmodel tells no mode", "on a Thor: `sudo nvpmodel -q`")
    seen = f"{mode.number} {mode.name}".strip()
    if mode.number:
        return Finding("power mode", Level.WARN, seen, "`sudo nvpmodel -m 0` is MAXN, the fastest")
    return Finding("power mode", Level.OK, seen)


def _overcurrent(place: Place) -> Finding:
    counts = sensors(place.root).overcurrent
    if not counts:
        return Finding("over-current", Level.UNKNOWN, "no counters here")
    seen = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
    if any(counts.values()):
        return Finding("over-current", Level.WARN, seen, "use the supplied power adapter or a lower mode")
    return Finding("over-current", Level.OK, seen)


def _cpu_clock(place: Place) -> Finding:
    cpus = {name: clock.current for name, clock in clocks(place.root).items() if name.startswith("cpu")}
    if not cpus:
        return Finding("cpu clock", Level.UNKNOWN, "no CPU tells its clock")
    fastest = max(cpus.values())
    seen = f"fastest of {len(cpus)} at {fastest / 1e6:.0f} MHz"
    if fastest < STUCK_HZ:
        return Finding("cpu clock", Level.WARN, seen, "stuck after an over-current event: power off, wait, power on")
    return Finding("cpu clock", Level.OK, seen)


def _disk(place: Place) -> Finding:
    free = shutil.disk_usage(place.root).free
    seen = f"{free / GIB:.0f} GiB free on {place.root}"
    if free < DISK_WARN_BYTES:
        return Finding("disk", Level.WARN, seen, "100 GiB are wanted: `docker image prune`, or a larger disk")
    return Finding("disk", Level.OK, seen)


def _memory(place: Place) -> Finding:
    found = memory(place.root)
    if found.available is None:
        return Finding("memory", Level.UNKNOWN, "no /proc/meminfo")
    parts = {"available": found.available, "free": found.free, "cached": found.cached, "of": found.total}
    seen = ", ".join(f"{name} {value / GIB:.1f} GiB" for name, value in parts.items() if value is not None)
    if found.available < AVAILABLE_WARN_BYTES:
        return Finding("memory", Level.WARN, seen, "end what holds it, or choose a smaller model")
    return Finding("memory", Level.OK, seen)


def _swap(place: Place) -> Finding:
    text = text_of(place.root, "proc/swaps")
    if text is None:
        return Finding("swap", Level.UNKNOWN, "no /proc/swaps")
    devices = [line.split()[0] for line in text.splitlines()[1:] if line.split()]
    disks = [device for device in devices if "zram" not in device]
    if disks:
        return Finding("swap", Level.WARN, ", ".join(disks), "`sudo swapoff -a`: an engine that swaps looks hung")
    return Finding("swap", Level.OK, ", ".join(devices) or "none")


def _orphans(place: Place) -> Finding:
    found = []
    for pid in filter(str.isdecimal, names_in(place.root, "proc")):
        title = (text_of(place.root, "proc", pid, "cmdline") or "").split("\0")[0]
        # A child of init has lost its parent; others belong to an engine that runs.
        parent = re.search(r"^PPid:\s*(\d+)", text_of(place.root, "proc", pid, "status") or "", re.MULTILINE)
        if title.startswith("VLLM::") and parent and parent[1] == "1":
            found.append(f"{pid} {title}")
    if found:
        return Finding("orphans", Level.FAIL, ", ".join(found), f"`sudo kill -9 {found[0].split()[0]}`")
    return Finding("orphans", Level.OK, "no engine without a parent")


def _clock(place: Place) -> Finding:
    now = place.now or time.time()
    seen = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < EARLIEST_CLOCK:
        return Finding("time", Level.WARN, seen, "`sudo timedatectl set-ntp true`: certificates are checked against it")
    return Finding("time", Level.OK, seen)


def _port(place: Place) -> Finding:
    name = f"{place.host}:{place.port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place.host, place.port))
        except OSError as error:
            return Finding(
                "port", Level.WARN, f"{name}: {error.strerror}", "fine if it is the appliance; else set MJOLNIR_PORT"
            )
    return Finding("port", Level.OK, f"{name} is free")


def _model(place: Place) -> Finding:
    if not place.model:
        return Finding("model", Level.UNKNOWN, "none is set", "set MJOLNIR_MODEL in .env")
    path = Path(place.model).expanduser()
    if not path.is_absolute() or not path.exists():
        return Finding("model", Level.UNKNOWN, f"{place.model}: not a path here", "`--model` names the folder")
    try:
        size = check_model(path)
    except ModelError as error:
        return Finding("model", Level.FAIL, str(error), "download it again")
    return Finding("model", Level.OK, f"{path}: {size / GIB:.2f} GiB of weights")


_CHECKS: tuple[Callable[[Place], Finding], ...] = (
    _jetpack, _driver, _power, _overcurrent, _cpu_clock, _disk, _memory, _swap, _orphans, _clock, _port, _model,
)  # fmt: skip
