"""Whether FlashAttention 4 can be used on sm_110: asked of the device once, in a child process, and kept on disk.

vLLM 0.32.0 has FlashAttention 4 for sm_110 but does not choose it there. patches/flash-attn-sm110.patch lets it, where
:func:`usable` says that the kernels gave right results on this very device. It is called in processes that must not
initialise CUDA, so nothing here imports torch; mjolnir/fa4_child.py does, in a process of its own, whose crash or
hang harms no engine. docs/fa4.md tells the whole of it.
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mjolnir.env import BackendSettings

logger = logging.getLogger("vllm.mjolnir")

HEAD_SIZES = (64, 128, 256)
WITHOUT_DESCALES = 256  # has a kernel of its own, which takes none
TILE_PAGE = 128  # such a page comes by TMA, any other by cp.async: two kernels
USUAL_PAGE = 16  # vLLM's own choice on CUDA
TIME_LIMIT = 600.0  # seconds; compiling is nearly all of it: 5 s a kernel on one x86 core
MARK = "THOR FA4 verdict "
FORMAT = "mjolnir.fa4_verdict/1"
KERNELS_VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
# From outside: the kernel's killer for memory, and whoever stops the engine. The next start may do better.
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Verdict:
    """What the probe found.

    Attributes:
        passed: every result was right.
        detail: one line: figures, or what went wrong.
        lasting: worth keeping; false where the next start may well find another one.
    """

    passed: bool
    detail: str
    lasting: bool = True


def usable(head_size: int | None = None, head_size_v: int | None = None, *, fp8: bool = False) -> bool:
    """Whether FlashAttention 4 serves a head size on this device of compute capability 11.x.

    Args:
        head_size: of Q and K; None for that of the current model.
        head_size_v: of V; None for the same.
        fp8: with an fp8 KV cache.

    Raises:
        ConfigurationError: a setting that can't be used.
    """
    size = head_size if head_size is not None else _model_head_size()
    return head_size_v in (None, size) and refusal(size, fp8=fp8) is None


def refusal(head_size: int, *, fp8: bool) -> str | None:
    """Why FlashAttention 4 does not serve a head size here, or None when it does; tells the log once."""
    setting = BackendSettings.from_env().fa4
    reason = None
    if setting == "off":
        reason = "off by MJOLNIR_ATTN_FA4"
    elif head_size not in HEAD_SIZES:
        reason = f"not run: accepted are head sizes {', '.join(map(str, HEAD_SIZES))}"
    elif head_size == WITHOUT_DESCALES and (fp8 or _cache_is_quantized()):
        reason = "not run: the kernel for this head size takes no descales, so no fp8 KV cache"
    if reason is None:
        os.environ.setdefault(KERNELS_VARIABLE, str(folder() / "kernels"))
        found = (
            Verdict(True, "not run, on by MJOLNIR_ATTN_FA4")
            if setting == "on"
            else verdict(head_size, _pages(head_size))
        )
        if found.passed:
            _tell(head_size, found.detail)
            return None
        reason = found.detail
    _tell(head_size, f"{reason}; an fp8 KV cache is for FLASHINFER, else TRITON_ATTN")
    return f"THOR FA4 {head_size} probe: {reason}"


@functools.cache
def _tell(head_size: int, text: str) -> None:
    logger.info("THOR FA4 %d probe: %s", head_size, text)


def _config() -> Any:
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415

    return get_current_vllm_config_or_none()


def _model_head_size() -> int:
    config = _config()
    return int(config.model_config.get_head_size()) if config is not None and config.model_config is not None else 128


def _cache_is_quantized() -> bool:
    from vllm.utils.torch_utils import is_quantized_kv_cache  # noqa: PLC0415

    config = _config()
    return config is not None and bool(is_quantized_kv_cache(config.cache_config.cache_dtype))


def _pages(head_size: int) -> tuple[int, ...]:
    """Page sizes to probe: a tile's, and another one. Only what the user gave is the same in every process."""
    if head_size == WITHOUT_DESCALES:
        return (TILE_PAGE,)
    config = _config()
    chosen = config.cache_config.block_size if config is not None else None
    if not chosen or not config.cache_config.user_specified_block_size or chosen % 16:
        chosen = USUAL_PAGE
    return tuple(sorted({TILE_PAGE, int(chosen)}))


def folder() -> Path:
    """Where verdicts are kept: below ``VLLM_CACHE_ROOT``, else ``~/.cache``."""
    root = os.environ.get("VLLM_CACHE_ROOT", "").strip() or "~/.cache"
    return Path(f"{root}/mjolnir/fa4").expanduser()


@functools.cache
def verdict(head_size: int, pages: tuple[int, ...]) -> Verdict:
    """The kept verdict, else that of a probe; only one process probes at a time, the others then read what it kept."""
    key = {**identity(), "head_size": str(head_size), "pages": ", ".join(map(str, pages))}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = folder() / f"{head_size}-{name}.json"
    with _alone(folder()):
        kept = _read(file, key)
        if kept is not None:
            return kept
        logger.info("THOR FA4 %d probe: runs, once on this device; compiling takes a minute or more", head_size)
        begin = time.monotonic()
        found = run_child(head_size, pages)
        detail = f"{'passed' if found.passed else 'failed'}: {found.detail}, {time.monotonic() - begin:.0f} s"
        found = Verdict(found.passed, detail, found.lasting)
        if found.lasting:
            _write(file, key, found)
    return found


def identity() -> dict[str, str]:
    """What a verdict holds for: driver, torch, vLLM, CuTe DSL, architecture, and the sources of kernels and probe."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    capability = current_platform.get_device_capability()
    return {
        "driver": _driver(),
        "torch": _version("torch"),
        "vllm": _version("vllm"),
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "architecture": f"{capability.major}.{capability.minor}" if capability is not None else "none",
        "sources": _hash_of_sources(),
    }


def _driver() -> str:
    """The kernel driver's own line, and Jetson's release: both are files, so nothing is initialised."""
    lines = []
    for name in ("/proc/driver/nvidia/version", "/etc/nv_tegra_release"):
        with contextlib.suppress(OSError):
            lines += Path(name).read_text(errors="replace").splitlines()[:1]
    return " | ".join(lines) or "unknown"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _hash_of_sources() -> str:
    spec = importlib.util.find_spec("vllm.vllm_flash_attn")
    root = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path("/nonexistent")
    digest = hashlib.sha256(Path(__file__).with_name("fa4_child.py").read_bytes())
    for path in sorted([*(root / "cute").rglob("*.py"), *root.glob("*.py")]):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Holds the lock of the folder; where that can't be had the probe runs all the same."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle = os.open(place / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        logger.info("THOR FA4: %s can't be used, so the verdict is not kept: %s", place, error.strerror)
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(file: Path, key: dict[str, str]) -> Verdict | None:
    """A kept verdict; None where there is none, or a file that this module has not written as it is."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if table["format"] != FORMAT or table["key"] != key:
            return None
        passed, detail = table["verdict"]["passed"], table["verdict"]["detail"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Verdict(passed, detail) if isinstance(passed, bool) and isinstance(detail, str) else None


def _write(file: Path, key: dict[str, str], found: Verdict) -> None:
    table = {"format": FORMAT, "key": key, "verdict": asdict(found)}
    try:
        handle, name = tempfile.mkstemp(prefix=".verdict-", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(table, stream, indent=2)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(name, file)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.info("THOR FA4: the verdict can't be kept in %s: %s", file, error.strerror)


def run_child(head_size: int, pages: Sequence[int], seconds: float = TIME_LIMIT) -> Verdict:
    """Run the probe in a process of its own; a crash, an error and a hang are failed probes."""
    command = [sys.executable, "-P", "-m", "mjolnir.fa4_child", str(head_size), *map(str, pages)]
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The child asks for FlashAttention 4 by its version, and must not start a probe itself.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "MJOLNIR_ATTN_FA4": "off", "VLLM_PLUGINS": ""}
    # Files, not pipes: a child that hangs on the device may not even die, and nobody may wait for it then.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return Verdict(False, f"can't be started: {error.strerror}", lasting=False)
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(child)
            return Verdict(False, f"no answer within {seconds:g} s")
        except BaseException:
            _end(child)
            raise
        output.seek(0)
        errors.seek(0)
        return _judge(code, output.read(), errors.read())


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)


def _judge(code: int, output: str, errors: str) -> Verdict:
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if code == 0 and len(lines) == 1:
        return Verdict(**json.loads(lines[0]))
    if code < 0:
        return Verdict(False, f"ended by {signal.Signals(-code).name}", lasting=-code not in OUTSIDE_SIGNALS)
    last = (errors.strip().splitlines() or ["nothing on stderr"])[-1]
    return Verdict(False, f"ended with code {code}: {last[:200]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe by hand: 0 when every head size passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m mjolnir.fa4_probe", description="Probe FlashAttention 4.")
    parser.add_argument("head_size", type=int, nargs="*", help="out of 64, 128 and 256 (default: 64 and 128)")
    parser.add_argument("--again", action="store_true", help="forget kept verdicts first")
    options = parser.parse_args(arguments)
    if unknown := set(options.head_size) - set(HEAD_SIZES):
        parser.error(f"head_size {min(unknown)}: accepted: {', '.join(map(str, HEAD_SIZES))}")
    if options.again:
        for file in folder().glob("*.json"):
            file.unlink()
        shutil.rmtree(folder() / "kernels", ignore_errors=True)
    os.environ.setdefault(KERNELS_VARIABLE, str(folder() / "kernels"))
    passed = True
    for head_size in options.head_size or (64, 128):
        found = verdict(head_size, (USUAL_PAGE, TILE_PAGE))
        sys.stdout.write(f"THOR FA4 {head_size} probe: {found.detail}\n")
        passed &= found.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
