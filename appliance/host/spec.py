"""The appliance's container: what `.env` says of it, and the limits that compose.yaml gives it too.

compose.yaml and this file describe the same container. The variables are compose's own:
``MJOLNIR_HOST`` and ``MJOLNIR_PORT`` (where the host listens), ``MODELS_DIR``, ``CACHE_DIR``, ``KEYS_DIR``,
``SHM_SIZE``, ``STOP_GRACE_PERIOD``, and every setting of the appliance, which is passed on.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dotenv import dotenv_values

from appliance.host.errors import UsageError
from appliance.settings import BACKEND_NAMES, BACKEND_PREFIXES, Settings, variable

INNER_PORT = 8000
TMPFS = {"/tmp": "exec,nosuid,nodev,mode=1777,size=2g"}  # noqa: S108  (the container's own)
MEMLOCK_BYTES = -1
STACK_BYTES = 67108864
LOG_OPTIONS = {"max-size": "20m", "max-file": "5"}
# Named as compose names the volumes of its project, so that models and caches stay when one takes over from the other.
VOLUMES = {"MODELS_DIR": ("mjolnir_models", "/models"), "CACHE_DIR": ("mjolnir_cache", "/cache")}
KEYS_TARGET = "/etc/mjolnir/keys"
PROFILES_TARGET = "/etc/mjolnir/profiles"
# What tells a board's release and power mode; a file that this board lacks is left out.
BOARD_FILES = {
    "/etc/nv_tegra_release": "NV_TEGRA_RELEASE",
    "/etc/nvpmodel.conf": "NVPMODEL_CONF",
    "/var/lib/nvpmodel": "NVPMODEL_STATUS",
}

_INNER = {
    "MJOLNIR_HOST": "0.0.0.0",  # noqa: S104  (inside the container; the publication decides who reaches it)
    "MJOLNIR_PORT": str(INNER_PORT),
    "MJOLNIR_CACHE_DIR": "/cache",
    "MJOLNIR_PROFILES_DIR": "/etc/mjolnir/profiles",
    "HOME": "/cache/home",
    "HF_HOME": "/models/huggingface",
}
_NVIDIA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_NOT_PASSED = {variable("stats_dir"), variable("engine_command"), *_INNER}
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_SIZE = re.compile(r"(\d+)\s*(b|k|kb|m|mb|g|gb)?", re.IGNORECASE)
_UNITS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30}


@dataclass(frozen=True)
class Spec:
    """Everything about the container but its image and its name.

    Attributes:
        runtime: OCI runtime; empty means the daemon's default.
        host: address of the machine that the port is published on.
        port: its port.
        environment: variables of the container.
        mounts: a volume's name or a folder, by the path in the container; ``:ro`` behind it is read-only.
        shm_bytes: size of /dev/shm.
        stop_seconds: time between SIGTERM and SIGKILL.
    """

    runtime: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    shm_bytes: int = 8 << 30
    stop_seconds: int = 90

    @property
    def fingerprint(self) -> str:
        """Changes when anything above does; never tells a secret."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def read_variables(env_file: Path) -> dict[str, str]:
    """The variables of ``.env`` and of the environment, which wins; blank ones count as not set.

    Raises:
        UsageError: the file can't be read.
    """
    try:
        lines = dotenv_values(env_file) if env_file.exists() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{env_file}: can't be read: {error}") from None
    merged = {name: value or "" for name, value in lines.items()}
    merged.update({name: value for name, value in os.environ.items() if value})
    return {name: value.strip() for name, value in merged.items() if value.strip()}


def spec_of(variables: Mapping[str, str], folder: Path, runtime: str) -> Spec:
    """The container that the variables describe.

    Args:
        variables: those of `.env` and of the environment.
        folder: where `.env` lies; relative folders count from there, as with compose.
        runtime: OCI runtime, empty for the daemon's default.

    Raises:
        UsageError: a variable that can't be used.
    """
    environment = {name: value for name, value in variables.items() if _is_passed(name)} | _INNER
    mounts = {target: _source(variables.get(name) or volume, folder) for name, (volume, target) in VOLUMES.items()}
    mounts[KEYS_TARGET] = _source(variables.get("KEYS_DIR", "./keys"), folder) + ":ro"
    mounts[PROFILES_TARGET] = _source(variables.get("PROFILES_DIR", "./profiles"), folder) + ":ro"
    if runtime == "nvidia":
        environment |= _NVIDIA
        files = {target: Path(variables.get(name, target)) for target, name in BOARD_FILES.items()}
        mounts |= {target: f"{source}:ro" for target, source in files.items() if source.exists()}
    return Spec(
        runtime=runtime,
        host=variables.get("MJOLNIR_HOST", "127.0.0.1"),
        port=_port(variables.get("MJOLNIR_PORT", "8000")),
        environment=dict(sorted(environment.items())),
        mounts=mounts,
        shm_bytes=_bytes(variables.get("SHM_SIZE", "8gb")),
        stop_seconds=_seconds(variables.get("STOP_GRACE_PERIOD", "90s")),
    )


def _is_passed(name: str) -> bool:
    if name in _NOT_PASSED:
        return False
    known = {variable(setting) for setting in Settings.model_fields} | {*BACKEND_NAMES, "HF_TOKEN"}
    return name in known or name.startswith(BACKEND_PREFIXES)


def _source(value: str, folder: Path) -> str:
    """A folder becomes absolute; what has no slash is a volume's name."""
    if value.startswith(("/", ".", "~")):
        return str((folder / Path(value).expanduser()).resolve())
    return value


def _port(value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) <= 65535:
        raise UsageError(f"MJOLNIR_PORT={value!r}: accepted: 1 to 65535")
    return int(value)


def _bytes(value: str) -> int:
    match = _SIZE.fullmatch(value)
    if match is None:
        raise UsageError(f"SHM_SIZE={value!r}: accepted: a size such as 8gb")
    return int(match[1]) << _UNITS[(match[2] or "").lower().removesuffix("b") or ""]


def _seconds(value: str) -> int:
    match = _DURATION.fullmatch(value)
    if match is None or not any(match.groups()):
        raise UsageError(f"STOP_GRACE_PERIOD={value!r}: accepted: a duration such as 90s or 2m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds
