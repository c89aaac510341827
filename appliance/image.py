"""The image: built, saved and loaded through Docker's daemon, the one that ``DOCKER_HOST`` names or the local one.

``python -m appliance.image build|save|load`` is what ``scripts/image`` runs; `mjolnir image` calls the same functions.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import docker
import requests
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from appliance.host.errors import DaemonError, HostError, UsageError
from appliance.image_context import DOCKERFILE, Inputs, write_context
from appliance.patchqueue import REPOSITORY
from mjolnir import __version__

TARGETS = ("thor", "cpu")
PLATFORMS = {"thor": "linux/arm64"}
_BASE_ARGUMENT = {"thor": "BASE_IMAGE", "cpu": "CPU_BASE_IMAGE"}
# Reach the *-build stages only, or are the daemon's predefined ones: neither stays in the image.
_PASSED = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_TIMEOUT_SECONDS = 3600.0  # silence of the daemon: one step may download or compile for long
_LAST_LINES = 3
_PIECE_BYTES = 1 << 20

_STEP = re.compile(r"^Step (\d+)/(\d+) : (.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOISE = ("--->", "Removing intermediate container ")
_EXIT_CODE = re.compile(r"returned a non-zero code: (\d+)")


def build_image(
    target: str = "thor",
    tag: str = "",
    *,
    base: str = "",
    wheels: Path | None = None,
    certificates: Path | None = None,
    platform: str | None = None,
    no_cache: bool = False,
    root: Path = REPOSITORY,
    console: Console | None = None,
) -> str:
    """Build the image from this checkout, with progress on the console; returns its id.

    Args:
        target: thor or cpu.
        tag: name of the image; empty means mjolnir:TARGET.
        base: image to build on; empty means the Dockerfile's default.
        wheels: folder of wheels; pip then asks no index.
        certificates: PEM file that pip trusts during the build; None takes PIP_CERT where it is set.
        platform: None means the target's own (thor: linux/arm64), empty the daemon's.
        no_cache: run every step again.
        root: the checkout.
        console: where progress is shown; None means stderr.

    Raises:
        UsageError: an argument that can't be used.
        DaemonError: Docker's daemon does not answer, or refused.
        HostError: a step of the build failed; names the step and its last lines.
    """
    if target not in TARGETS:
        raise UsageError(f"target={target!r}: accepted: {', '.join(TARGETS)}")
    if certificates is None and (named := os.environ.get("PIP_CERT")):
        certificates = Path(named)
    arguments = build_arguments(target, base, root, os.environ, offline=wheels is not None)
    with (
        tempfile.TemporaryFile(prefix="mjolnir-context-") as stream,
        _daemon() as client,
        _progress(console) as progress,
    ):
        files = write_context(stream, root, target, Inputs(wheels, certificates))
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        upload = progress.add_task(f"context, {files} files", total=size)
        events = client.build(
            fileobj=progress.wrap_file(cast("Any", stream), task_id=upload),
            custom_context=True,
            dockerfile=DOCKERFILE,
            tag=tag or f"mjolnir:{target}",
            target=target,
            buildargs=arguments,
            platform=(PLATFORMS.get(target) if platform is None else platform) or None,
            nocache=no_cache,
            rm=True,
            forcerm=True,
            decode=True,
        )
        return follow(events, progress)


def build_arguments(
    target: str, base: str, root: Path, environment: Mapping[str, str], *, offline: bool
) -> dict[str, str]:
    """The build arguments: base, labels, and what pip and the steps need of the environment.

    Args:
        target: thor or cpu.
        base: image to build on; empty leaves the Dockerfile's default.
        root: the checkout, whose commit the labels name.
        environment: where pip's settings and proxies are taken from.
        offline: wheels are given, so that pip's settings are not needed.
    """
    revision = _git(root, "rev-parse", "HEAD") or "unknown"
    dirty = "-dirty" if _git(root, "status", "--porcelain") else ""
    arguments = {
        "VERSION": __version__,
        "REVISION": revision + dirty,
        # The commit's time and not the build's: the same inputs give the same labels.
        "CREATED": _git(root, "show", "--no-patch", "--format=%cI", "HEAD") or "unknown",
    }
    if base:
        arguments[_BASE_ARGUMENT[target]] = base
    names = _PROXIES if offline else (*_PROXIES, *_PASSED)
    given = {name: environment[name] for name in names if environment.get(name)}
    # A folder of this machine is none in the container.
    return arguments | {name: value for name, value in given.items() if not value.startswith("file:")}


def follow(events: Iterable[Mapping[str, Any]], progress: Progress) -> str:
    """Show a build as the daemon tells it; returns the id of the image.

    Raises:
        HostError: a step failed, or the daemon ended without an image.
    """
    step, instruction, image = "", "", ""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    bar = progress.add_task("build", total=None)
    for event in events:
        if "error" in event:
            raise HostError(_failure(step, instruction, str(event["error"]), last))
        if aux := event.get("aux"):
            image = str(aux.get("ID") or image)
        text = str(event.get("stream", ""))
        if found := _STEP.match(text):
            step, instruction = f"{found[1]}/{found[2]}", found[3].strip()
            last.clear()
            shown = " ".join(instruction.split())
            progress.update(bar, completed=int(found[1]) - 1, total=int(found[2]), description=shown[:60])
            progress.console.print(f"step {step}: {shown}", markup=False, highlight=False)
            continue
        last.extend(line for line in _lines(text) if not line.startswith(_NOISE))
    if not image:
        raise HostError("the daemon ended the build without an image")
    progress.update(bar, completed=progress.tasks[bar].total or 1, description="built")
    return image


def _lines(text: str) -> list[str]:
    """Lines that say something, without the colour that the daemon gives to stderr."""
    return [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]


def _failure(step: str, instruction: str, error: str, last: Iterable[str]) -> str:
    where = f"step {step} ({' '.join(instruction.split())})" if step else "the build"
    code = _EXIT_CODE.search(error)
    how = f"failed with exit code {code[1]}" if code else f"failed: {' '.join(error.split())}"
    return f"{where} {how}" + "".join(f"; {line}" for line in last if line not in error)


def save_image(tag: str, file: Path, *, console: Console | None = None) -> int:
    """Write an image to a tar file, for a machine without a network; returns its size in bytes.

    The file appears under its name when it is complete.

    Raises:
        DaemonError: Docker's daemon does not answer, or has no such image.
        HostError: the file can't be written.
    """
    partial = file.with_name(f".{file.name}.partial")
    with _daemon() as client, _progress(console) as progress:
        total = int(client.inspect_image(tag)["Size"])
        task = progress.add_task(f"saving {tag}", total=total)
        try:
            with partial.open("wb") as stream:
                for piece in client.get_image(tag, chunk_size=_PIECE_BYTES):
                    stream.write(piece)
                    progress.advance(task, len(piece))
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(file)
        except OSError as error:
            if isinstance(error, requests.RequestException):
                raise
            raise HostError(f"{file}: can't be written: {error.strerror}") from None
        finally:
            partial.unlink(missing_ok=True)
    return file.stat().st_size


def load_image(file: Path, *, console: Console | None = None) -> list[str]:
    """Load images from a file that ``save_image`` wrote; returns their names.

    Raises:
        UsageError: there is no such file.
        DaemonError: Docker's daemon does not answer, or can't use the file.
    """
    try:
        stream: IO[bytes] = file.open("rb")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; accepted: a file that `mjolnir image save` wrote") from None
    with stream, _daemon() as client, _progress(console) as progress:
        task = progress.add_task(f"loading {file.name}", total=file.stat().st_size)
        names: list[str] = []
        wrapped = progress.wrap_file(cast("Any", stream), task_id=task)
        for event in client.load_image(wrapped, quiet=True):
            if "error" in event:
                raise DaemonError(f"{file}: the daemon can't load it: {event['error']}")
            names += re.findall(r"^Loaded image(?: ID)?: (\S+)", str(event.get("stream", "")), re.MULTILINE)
    if not names:
        raise DaemonError(f"{file}: the daemon found no image in it")
    return names


@contextlib.contextmanager
def _daemon() -> Iterator[Any]:
    """The daemon's API; makes one line of what docker-py raises."""
    try:
        with contextlib.closing(docker.from_env(timeout=_TIMEOUT_SECONDS)) as client:
            yield client.api
    except docker.errors.APIError as error:
        raise DaemonError(f"Docker's daemon refused: {' '.join(str(error.explanation).split())}") from None
    except (docker.errors.DockerException, requests.RequestException) as error:
        reason = " ".join(str(error).split())
        raise DaemonError(
            f"Docker's daemon can't be used: {reason}; start it (`systemctl start docker`), or set DOCKER_HOST"
        ) from None


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), _Amount(), TimeElapsedColumn())
    return Progress(*columns, console=console or Console(stderr=True))


class _Amount(DownloadColumn):
    """Bytes for transfers, steps for the build."""

    _steps = MofNCompleteColumn()

    def render(self, task: Any) -> Any:
        if task.total is None or task.total < _PIECE_BYTES:
            return self._steps.render(task)
        return super().render(task)


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
