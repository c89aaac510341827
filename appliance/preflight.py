"""What is checked before an engine is started: model files, folders, flags, memory."""

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from appliance.command import SERVE, Launch, flag_names, is_local
from appliance.errors import EngineError, SettingsError
from appliance.modelcheck import check_model
from appliance.settings import Settings

log = logging.getLogger(__name__)

_FLAG_CHECK_SECONDS = 300.0
_REMEMBERED = 16  # command lines that were accepted: a switch of profiles and the way back ask nothing
# Sources of vLLM that decide which flags there are; the patch queue touches some of them.
_PARSER_SOURCES = (
    "config/*.py",
    "engine/arg_utils.py",
    "entrypoints/cli/serve.py",
    "entrypoints/launchers/cli_args.py",
    "v1/attention/backends/registry.py",
)


# Where the engine listens, and how it ends, is the supervisor's; a configuration file could say either.
_OURS = frozenset(
    f"--{name}"
    for name in (
        *("host", "port", "uds", "root-path", "headless", "grpc", "grpc-port", "config", "shutdown-timeout"),
        *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"),
    )
)
# A command line can be read by every program on the machine.
_SECRET = {
    "--api-key": "keys in a file (--api-keys-file or MJOLNIR_API_KEYS_FILE)",
    "--hf-token": "HF_TOKEN in the environment or in .env",
}
_SHORTEST_ABBREVIATION = 4
_LEAST_SHARED_MEMORY = 1 << 30


def check_settings(settings: Settings) -> int:
    """The checks that cost nothing: made before anything else, the port included.

    Returns:
        Bytes of the model's weights; 0 where they are not known.

    Raises:
        SettingsError: a setting that can't be used.
        ModelError: model files that are missing, incomplete or corrupt.
    """
    if not settings.model:
        raise SettingsError("model is not set; accepted: a model's folder or a hub id (--model or MJOLNIR_MODEL)")
    for name, folder in (("cache_dir", settings.cache_dir), ("stats_dir", settings.stats_dir)):
        _writable(name, folder)
    check_engine_args(settings.engine_args)
    if not is_local(settings.model):
        if settings.offline:
            raise SettingsError(f"model={settings.model!r}: a hub id can't be used offline; accepted: a model's folder")
        return 0
    given = flag_names(settings.engine_args)
    return check_model(
        Path(settings.model).expanduser(),
        weights="--load-format" not in given,
        tokenizer=not given & {"--tokenizer", "--skip-tokenizer-init"},
    )


def check_engine_args(words: Iterable[str]) -> None:
    """Refuse flags that would take the engine out of the supervisor's hands, or show a secret.

    Raises:
        SettingsError: there is one; by its name only.
    """
    for name in sorted(flag_names(words)):
        # The parser of vLLM takes abbreviations too.
        meant = [flag for flag in (*_SECRET, *_OURS) if name == flag or _abbreviates(name, flag)]
        secret = next((flag for flag in meant if flag in _SECRET), None)
        if secret is not None:
            raise SettingsError(f"engine_args: {secret} shows a secret to every user; accepted: {_SECRET[secret]}")
        if meant:
            raise SettingsError(f"engine_args: {name} is the appliance's to decide; accepted: its own settings")


def warn_of_shared_memory(folder: str = "/dev/shm") -> None:  # noqa: S108  (looked at, not written to)
    """Say when shared memory is too small for what vLLM's processes exchange: they would die of a bus error."""
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        return
    if size < _LEAST_SHARED_MEMORY:
        log.warning(
            "%s has %d MiB, vLLM's processes need 1024 or more: set shm_size (docker run --shm-size, compose "
            "shm_size) or ipc: host",
            folder,
            size >> 20,
        )


def _abbreviates(name: str, flag: str) -> bool:
    return len(name) >= _SHORTEST_ABBREVIATION and flag.startswith(name)


async def check_flags(settings: Settings, launch: Launch) -> None:
    """Have vLLM's parser look at the engine's command line, in a process of its own.

    Flags that this vLLM has accepted before are not asked about again: the question costs its import.

    Raises:
        SettingsError: vLLM does not accept a flag; the message names it.
        EngineError: vLLM can't be asked.
    """
    if settings.engine_command:
        return  # a program of the user's with flags of its own
    words = [word for word in launch.command[len(SERVE) :] if word != str(launch.socket)]
    memo = settings.cache_dir / "accepted-flags.json"
    key = _memo_key(words)
    accepted = _read(memo)
    if key in accepted:
        return
    error = await _ask_parser(list(launch.command[len(SERVE) :]), launch.environment)
    if error is not None:
        raise SettingsError(f"vLLM does not accept the engine's flags: {error}")
    if key is not None:
        with contextlib.suppress(OSError):  # only the next start's time is lost
            memo.write_text(json.dumps([*accepted, key][-_REMEMBERED:]))


async def _ask_parser(arguments: list[str], environment: dict[str, str]) -> str | None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "appliance.flagcheck", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_FLAG_CHECK_SECONDS):
            output, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    lines = output.decode("utf-8", "replace").strip().splitlines() or ["no output"]
    try:
        verdict = json.loads(lines[-1])["error"]
    except (ValueError, KeyError, TypeError):
        raise EngineError(f"vLLM can't be asked about its flags: {lines[-1].strip()}") from None
    return None if verdict is None else str(verdict)


def _memo_key(words: list[str]) -> str | None:
    """Stands for the flags and the parser; None where a flag names a file, whose content may change."""
    if any(os.path.isfile(word.rpartition("=")[2]) for word in words[1:]):
        return None
    spec = importlib.util.find_spec("vllm")  # looks for the package without importing it
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    stamps = [
        (str(source), source.stat().st_mtime_ns, source.stat().st_size)
        for pattern in _PARSER_SOURCES
        for source in sorted(root.glob(pattern))
    ]
    return hashlib.sha256(json.dumps([words, stamps]).encode()).hexdigest()


def _read(memo: Path) -> list[str]:
    try:
        found = json.loads(memo.read_text())
    except (OSError, ValueError):
        return []
    return [str(key) for key in found] if isinstance(found, list) else []


def _writable(name: str, folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{name}={str(folder)!r}: {error.strerror}; accepted: a folder to write to") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{name}={str(folder)!r}: not writable; accepted: a folder to write to")
