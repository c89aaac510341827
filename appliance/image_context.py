"""The build context of the image: a tar of the repository's files, wheels and certificates, the same each time.

Order, owners, modes and times of its members do not depend on the machine, so that the same files give the same bytes.
"""

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from docker.utils.build import PatternMatcher

from appliance.host.errors import HostError, UsageError

DOCKERFILE = "docker/Dockerfile"
INPUTS = "docker/inputs"

_FROM = re.compile(r"^FROM\s+(\S+)(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE | re.MULTILINE)
_COPY_FROM = re.compile(r"^(?:COPY|ADD)\s+--from=(\S+)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Inputs:
    """What a build is given beside the repository.

    Attributes:
        wheels: folder of wheels; pip then asks no index.
        certificates: PEM file that pip trusts during the build.
    """

    wheels: Path | None = None
    certificates: Path | None = None


def repository_files(root: Path) -> list[str]:
    """Files that git has or would take up and that .dockerignore lets through, sorted; paths relative to ``root``.

    Raises:
        HostError: git is missing, or the folder is no checkout.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise HostError("git is missing; the image is built from the files that git knows") from None
    except subprocess.CalledProcessError as error:
        raise HostError(f"{root}: git can't list its files: {error.stderr.strip()}") from None
    ignored = _ignore_rules(root / ".dockerignore")
    names = {name for name in result.stdout.split("\0") if name and (root / name).is_file()}
    return sorted(name for name in names if not ignored.matches(name))


def _ignore_rules(path: Path) -> PatternMatcher:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return PatternMatcher([line.strip() for line in lines if line.strip() and not line.startswith("#")])


def stages_for(dockerfile: str, target: str) -> str:
    """A Dockerfile with only the stages that ``target`` is made of, in their order.

    The classic builder builds every stage before the target, also those that it does not need: without this the
    image for a CPU would pull the base of the one for Thor.

    Raises:
        UsageError: there is no such stage.
    """
    marks = list(_FROM.finditer(dockerfile))
    ends = [mark.start() for mark in marks[1:]] + [len(dockerfile)]
    stages = {str(mark[2]): dockerfile[mark.start() : end] for mark, end in zip(marks, ends, strict=True)}
    if target not in stages:
        raise UsageError(f"target={target!r}: accepted: {', '.join(name for name in stages if '-' not in name)}")
    needed, open_names = set[str](), [target]
    while open_names:
        name = open_names.pop()
        if name in stages and name not in needed:
            needed.add(name)
            open_names += [_FROM.findall(stages[name])[0][0], *_COPY_FROM.findall(stages[name])]
    return dockerfile[: marks[0].start()] + "".join(text for name, text in stages.items() if name in needed)


def write_context(stream: IO[bytes], root: Path, target: str, inputs: Inputs) -> int:
    """Write the context as an uncompressed tar; returns how many files are in it.

    Raises:
        HostError: git can't list the repository's files.
        UsageError: there is no such target, or no wheel or certificate where one is said to be.
    """
    text = stages_for((root / DOCKERFILE).read_text(encoding="utf-8"), target)
    members = {name: root / name for name in repository_files(root) if name != DOCKERFILE}
    members.update(_given(inputs))
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted({*members, DOCKERFILE}):
            if name == DOCKERFILE:
                data = text.encode()
                archive.addfile(_member(name, len(data)), io.BytesIO(data))
                continue
            path = members[name]
            with path.open("rb") as source:
                archive.addfile(_member(name, path.stat().st_size, bool(path.stat().st_mode & 0o100)), source)
    return len(members) + 1


def _member(name: str, size: int, executable: bool = False) -> tarfile.TarInfo:
    """A member whose owner, mode and time are always the same: root, one of two modes, 1970."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o755 if executable else 0o644
    return info


def _given(inputs: Inputs) -> Iterator[tuple[str, Path]]:
    if inputs.wheels is not None:
        wheels = sorted(inputs.wheels.glob("*.whl"))
        if not wheels:
            raise UsageError(f"wheels={str(inputs.wheels)!r}: has no *.whl; accepted: a folder of wheels")
        yield from ((f"{INPUTS}/wheels/{wheel.name}", wheel) for wheel in wheels)
    if inputs.certificates is not None:
        if not inputs.certificates.is_file():
            raise UsageError(f"ca={str(inputs.certificates)!r}: there is no such file; accepted: a PEM file")
        yield f"{INPUTS}/ca.crt", inputs.certificates
