"""A cache of pinned wheels that are read, not installed: each is downloaded once and checked by its hash.

``python -m appliance.wheels UPSTREAM_TOML DISTRIBUTION`` fetches one wheel that the patch queue names and
prints its path. Standard library only. Whoever has no network can put the file into the folder by hand.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ApplianceError, DownloadError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Wheel:
    """One wheel of a package index, pinned by file name and SHA-256."""

    requirement: str
    file: str
    sha256: str


def cache_root() -> Path:
    """``$MJOLNIR_CACHE``, else ``mjolnir`` in the user's cache folder."""
    if root := os.environ.get("MJOLNIR_CACHE"):
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mjolnir"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex; reads it in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def upstream_wheel(toml: Path, distribution: str) -> Wheel:
    """The wheel of one distribution that the patch queue's ``upstream.toml`` pins.

    Raises:
        DownloadError: the file names no such wheel.
    """
    table = tomllib.loads(toml.read_text(encoding="utf-8"))
    for entry in table["wheels"]:
        if entry["distribution"] == distribution:
            return Wheel(f"{distribution}=={table['version']}", entry["file"], entry["sha256"])
    raise DownloadError(f"{toml}: names no wheel of {distribution}")


def fetch(wheel: Wheel, progress: Progress) -> Path:
    """The wheel's file in the cache, downloaded with pip when it is not there or is not what was pinned.

    Raises:
        DownloadError: pip could not get it, or what it got has another hash.
    """
    folder = cache_root() / "wheels"
    target = folder / wheel.file
    if target.is_file():
        if sha256_of(target) == wheel.sha256:
            return target
        progress(f"{target} is corrupt (its SHA-256 is not the pinned one); downloading it again")
    folder.mkdir(parents=True, exist_ok=True)
    progress(f"downloading {wheel.file}")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as staging:
        _pip_download(wheel, Path(staging), target)
        found = Path(staging) / wheel.file
        if not found.is_file():
            names = ", ".join(path.name for path in Path(staging).iterdir()) or "nothing"
            raise DownloadError(f"{wheel.requirement}: wanted {wheel.file}, the package index gave {names}")
        if (digest := sha256_of(found)) != wheel.sha256:
            raise DownloadError(f"{wheel.file}: expected SHA-256 {wheel.sha256}, got {digest}")
        found.replace(target)
    return target


def _pip_download(wheel: Wheel, folder: Path, target: Path) -> None:
    abi, platform = wheel.file.removesuffix(".whl").rsplit("-", 2)[1:]
    # --no-cache-dir: the wheel is kept in our cache, a second copy in pip's would double a large download.
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    tags = ["--python-version", "3.12", "--implementation", "cp", "--abi", abi, "--platform", platform]
    command = [sys.executable, "-m", "pip", "download", *options, *tags, "--dest", str(folder), wheel.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip gave no reason"]
        reason = errors[-1].removeprefix("ERROR:").strip()
        raise DownloadError(
            f"can't download {wheel.requirement}: {reason}; check the network, or put the file at {target}"
        )


def main(argv: list[str] | None = None) -> int:
    """Fetch one wheel and print its path; 1 with one line on stderr when that fails."""
    parser = argparse.ArgumentParser(prog="python -m appliance.wheels", description="Fetches a pinned wheel.")
    parser.add_argument("toml", type=Path, help="the patch queue's upstream.toml")
    parser.add_argument("distribution", help="which of the distributions named there")
    arguments = parser.parse_args(argv)
    try:
        wheel = upstream_wheel(arguments.toml, arguments.distribution)
        path = fetch(wheel, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    except (ApplianceError, OSError) as error:
        print(f"wheels: {error}", file=sys.stderr)  # noqa: T201
        return ApplianceError.exit_code
    print(path)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
