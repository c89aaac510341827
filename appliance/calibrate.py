"""`mjolnir calibrate`: has real vLLM show what K and V look like, and writes the scales of the 6-bit KV cache."""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from appliance import rootcause
from appliance.command import check_scales, is_local, kv_cache_dtype, tool_environment
from appliance.errors import EngineError, SettingsError, StoppedError
from appliance.settings import Settings, engine_environment
from mjolnir import scales
from mjolnir.calibration_prompts import PROMPTS
from mjolnir.names import FP6_KV_DTYPE, KV_SCALES_VARIABLE, STATS_DIR_VARIABLE

log = logging.getLogger(__name__)

MODULE = "mjolnir.calibration"
MARK = "MJOLNIR-CALIBRATION "  # in front of what that module tells; importing it here would import PyTorch

Follow = Callable[[int, int], None]  # is told how many prompts are done, and of how many


@dataclass(frozen=True)
class Choices:
    """What the command line can say.

    Attributes:
        out: scale file; None for where `mjolnir serve` looks.
        prompts_file: JSONL; None for our prompts.
        percentile: share of values, in percent, that must not saturate.
        turn: whether K and V are turned before they are rounded, see `mjolnir.turning`.
        answer_tokens: tokens generated for each prompt.
        max_model_len: longest prompt plus answer.
        tensor_parallel_size: GPUs.
    """

    out: Path | None = None
    prompts_file: Path | None = None
    percentile: float = 100.0
    turn: bool = True
    answer_tokens: int = 96
    max_model_len: int = 2048
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.percentile <= 100:
            raise SettingsError(f"percentile={self.percentile}: accepted: above 0, at most 100")
        for name in ("answer_tokens", "max_model_len", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: accepted: a whole number, 1 or more")


def calibrate(settings: Settings, choices: Choices, follow: Follow) -> dict[str, Any]:
    """Observe, and write the scale file.

    Returns:
        ``path``, and how many ``layers`` and ``tokens`` it stands for.

    Raises:
        SettingsError: a choice, a prompt, the model's name or a folder can't be used.
        EngineError: the model did not run, or what was observed gives no scales; nothing was written.
        StoppedError: Ctrl-C or SIGTERM; what was observed is kept.
    """
    if not settings.model:
        raise SettingsError("model is not set: accepted: --model FOLDER, or an id on the hub")
    prompts = list(PROMPTS) if choices.prompts_file is None else read_prompts(choices.prompts_file)
    out = (choices.out or scales.default_path(settings.cache_dir, settings.model)).absolute()
    model = str(Path(settings.model).expanduser().absolute()) if is_local(settings.model) else settings.model
    request: dict[str, Any] = {
        "model": model,
        "out": str(out),
        "prompts": prompts,
        "method": "max" if choices.percentile == 100 else "percentile",
        **{name: value for name, value in asdict(choices).items() if name not in ("out", "prompts_file")},
    }
    folder = settings.cache_dir.absolute() / "calibration" / _key(request)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"cache_dir={str(settings.cache_dir)!r}: {error.strerror}; accepted: a folder to write to"
        ) from None
    request["folder"] = str(folder)
    environment = tool_environment(settings, engine_environment()) | {STATS_DIR_VARIABLE: str(folder / "stats")}
    with _stopped_by_sigterm():
        _run(request, environment, folder, follow)
    shutil.rmtree(folder, ignore_errors=True)
    file = scales.load(out)
    return {"path": str(out), "layers": len(file.layers), "tokens": file.made.tokens}


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSONL file.

    Raises:
        SettingsError: it can't be read, or a line is no prompt.
    """
    accepted = 'accepted: a line of JSON for each prompt, {"prompt": "..."}'
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"prompts_file={path}: {error}; {accepted}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt.strip():
            raise SettingsError(f"prompts_file={path}: line {number} is no prompt; {accepted}")
        prompts.append(prompt)
    if not prompts:
        raise SettingsError(f"prompts_file={path}: it is empty; {accepted}")
    return prompts


def _key(request: dict[str, Any]) -> str:
    """Names what was asked of the model; the same question goes on with the same batches."""
    asked = {name: value for name, value in request.items() if name not in ("out", "method", "percentile")}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def bar() -> Iterator[Follow]:
    """A progress bar on a terminal."""
    columns = (TextColumn("calibrate"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def calibrate_first(settings: Settings, environment: dict[str, str]) -> None:
    """What `mjolnir serve --calibrate` does before it serves: make the scales that are missing, or can't be used.

    A file that MJOLNIR_KV_SCALES names is the user's, and never written.

    Args:
        settings: the appliance's.
        environment: what the engine will inherit.

    Raises:
        ApplianceError: see `calibrate`.
    """
    given = environment.get(KV_SCALES_VARIABLE) or settings.engine_variables.get(KV_SCALES_VARIABLE) or ""
    if not settings.calibrate or kv_cache_dtype(settings) != FP6_KV_DTYPE or given.strip():
        return
    path = scales.default_path(settings.cache_dir, settings.model)
    if path.exists():
        try:
            check_scales(settings, path)
        except SettingsError as error:
            log.warning("%s; calibrating anew", error)
        else:
            return
    longest = min(Choices.max_model_len, settings.max_model_len or Choices.max_model_len)
    choices = Choices(max_model_len=longest, tensor_parallel_size=_tensor_parallel_size(settings.engine_args))
    log.info("there are no scales for %s yet: calibrating, which takes minutes", settings.model)
    report = calibrate(settings, choices, lambda done, total: log.info("calibrated on %d of %d prompts", done, total))
    log.info("wrote %s: %d layers, %d tokens", report["path"], report["layers"], report["tokens"])


def _tensor_parallel_size(words: tuple[str, ...]) -> int:
    """GPUs of the engine that is to be served; what is no number is left to vLLM to refuse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", default="1")
    size: str = parser.parse_known_args(words)[0].tensor_parallel_size
    return int(size) if size.isdecimal() and int(size) else 1


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: the child is a session of its own, and would live on."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(request: dict[str, Any], environment: dict[str, str], folder: Path, follow: Follow) -> None:
    """Run the child to its end.

    Raises:
        EngineError: it failed.
        StoppedError: it was ended, since we are to end.
    """
    said: list[str] = []
    failure, written, done = None, False, 0
    try:
        for line in _lines(_command(request), environment, folder):
            if not line.startswith(MARK):
                said.append(line)
                continue
            told = json.loads(line.removeprefix(MARK))
            failure = told.get("error", failure)
            if "done" in told:
                done = told["done"]
                follow(done, told["total"])
            written = written or "written" in told
    except KeyboardInterrupt:
        raise StoppedError(
            f"calibration: stopped after {done} of {len(request['prompts'])} prompts; the same command goes on there"
        ) from None
    if not written:
        cause = rootcause.find(said)
        raise EngineError(f"calibration: {failure or (cause.text if cause else 'the model did not run to the end')}")


def _command(request: dict[str, Any]) -> tuple[str, ...]:
    return sys.executable, "-m", MODULE, json.dumps(request)


def _lines(command: tuple[str, ...], environment: dict[str, str], folder: Path) -> Iterator[str]:
    """The child's output; a child that is left alone is ended with everything that it started."""
    child = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert child.stdout is not None  # noqa: S101  (a pipe was asked for)
        with child.stdout:
            for line in child.stdout:
                yield line.rstrip("\n")
        child.wait()
    finally:
        if child.poll() is None:
            _end_session(child)


def _end_session(child: subprocess.Popen[str]) -> None:
    """End a child and its session: vLLM's workers are in it."""
    os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
