"""Compile caches that are put aside, because a broken file in one makes every start fail.

One old copy is kept for whoever wants to find out what was wrong with it.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
OLD = ".old"


def folders(environment: Mapping[str, str]) -> list[Path]:
    """The compile caches of an engine that hold anything, by its environment."""
    named = dict.fromkeys(Path(environment[name]) for name in VARIABLES if environment.get(name))
    return [folder for folder in named if _content(folder)]


def rotate(environment: Mapping[str, str]) -> list[Path]:
    """Put the compile caches aside, each beside itself with the suffix ``.old``. Blocks.

    Returns:
        Those that could be put aside.
    """
    done: list[Path] = []
    for folder in folders(environment):
        try:
            _put_aside(folder)
        except OSError as error:
            log.warning("%s can't be put aside: %s", folder, error.strerror)
        else:
            done.append(folder)
    return done


def _put_aside(folder: Path) -> None:
    old = folder.with_name(folder.name + OLD)
    if folder.is_mount() or folder.is_symlink():
        # A volume or a link can't be renamed away: what is in it goes into a folder of its own.
        old = folder / OLD
    shutil.rmtree(old, ignore_errors=True)
    if old.parent != folder:
        folder.rename(old)
        return
    old.mkdir()
    for entry in _content(folder):
        entry.rename(old / entry.name)


def _content(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.name != OLD]
    except OSError:
        return []
