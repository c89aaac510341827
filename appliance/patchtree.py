"""Writing to an installed tree: all of the files or none, and never into what an installer has hard-linked.

Standard library only.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from appliance.errors import PatchError

Tree = dict[str, bytes]
"""Path relative to site-packages, and content."""


def write_tree(root: Path, old: Tree, new: Tree) -> list[str]:
    """Write the files that differ, all or none of them; returns their paths.

    New contents lie beside the old ones before the first rename. A rename also leaves alone what an
    installer may have hard-linked from its cache.

    Raises:
        PatchError: the tree can't be written; it is then as it was.
    """
    changed = [path for path in new if new[path] != old[path]]
    staged: list[tuple[Path, Path]] = []
    renamed: list[str] = []
    try:
        for path in changed:
            staged.append((_stage(root / path, new[path]), root / path))
        for path, (source, target) in zip(changed, staged, strict=True):
            source.replace(target)
            renamed.append(path)
    except OSError as error:
        for path in renamed:
            _stage(root / path, old[path]).replace(root / path)
        reason = error.strerror or error
        raise PatchError(f"{error.filename or root}: can't be written: {reason}; nothing was changed") from error
    finally:
        for source, _ in staged:
            source.unlink(missing_ok=True)
    for path in changed:
        _drop_bytecode(root / path)
    return changed


def _stage(target: Path, data: bytes) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(target, name)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _drop_bytecode(target: Path) -> None:
    """Remove compiled files: images may ship them unchecked, and a checked one trusts mtime and size."""
    for cached in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        with suppress(OSError):
            cached.unlink()
