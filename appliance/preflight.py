"""What is checked before an engine is started: model files, folders, flags, memory."""

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path

from appliance.command import SERVE, Launch, flag_names, is_local
from appliance.errors import EngineError, SettingsError
from appliance.modelcheck import check_model
from appliance.settings import Settings

log = logging.getLogger(__name__)

_FLAG_CHECK_SECONDS = 300.0
# Sources of vLLM that decide which flags there are; the patch queue touches some of them.
_PARSER_SOURCES = (
    "config/*.py",
    "engine/arg_utils.py",
    "entrypoints/cli/serve.py",
    "entrypoints/launchers/cli_args.py",
    "v1/attention/backends/registry.py",
)


def check_settings(settings: Settings) -> None:
    """The checks that cost nothing: made before anything else, the port included.

    Raises:
        SettingsError: a setting that can't be used.
        ModelError: model files that are missing, incomplete or corrupt.
    """
    if not settings.model:
        raise SettingsError("model is not set; accepted: a model's folder or a hub id (--model or MJOLNIR_MODEL)")
    for name, folder in (("cache_dir", settings.cache_dir), ("stats_dir", settings.stats_dir)):
        _writable(name, folder)
    if not is_local(settings.model):
        if settings.offline:
            raise SettingsError(f"model={settings.model!r}: a hub id can't be used offline; accepted: a model's folder")
        return
    given = flag_names(settings.engine_args)
    size = check_model(
        Path(settings.model).expanduser(),
        weights="--load-format" not in given,
        tokenizer=not given & {"--tokenizer", "--skip-tokenizer-init"},
    )
    _log_memory(size)


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
    if key is not None and key == _read(memo):
        return
    error = await _ask_parser(list(launch.command[len(SERVE) :]), launch.environment)
    if error is not None:
        raise SettingsError(f"vLLM does not accept the engine's flags: {error}")
    if key is not None:
        with contextlib.suppress(OSError):  # only the next start's time is lost
            memo.write_text(json.dumps(key))


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


def _read(memo: Path) -> str | None:
    try:
        return str(json.loads(memo.read_text()))
    except (OSError, ValueError):
        return None


def _log_memory(weights: int) -> None:
    """CPU and GPU share their memory on Thor: what is free, what is only page cache, what will be asked for."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    gib = [kib.get(name, 0) / 2**20 for name in ("MemAvailable", "MemFree", "Cached")]
    log.info("memory: %.1f GiB available, %.1f free, %.1f cached; weights: %.2f GiB", *gib, weights / 2**30)


def _writable(name: str, folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{name}={str(folder)!r}: {error.strerror}; accepted: a folder to write to") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{name}={str(folder)!r}: not writable; accepted: a folder to write to")
