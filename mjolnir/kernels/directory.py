"""Compiled kernels on disk: an entry is read only as it was written, and another process sees all of it or nothing."""

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path

from triton.compiler import ASTSource, CompiledKernel

logger = logging.getLogger("vllm.mjolnir")

MANIFEST = "manifest"  # of an entry: a SHA-256 for each of its other files; without ".json", which Triton looks for


class KernelDirectory:
    """Compiled kernels in a directory: ``<directory>/<key>/``. Never fails: warns once, and then keeps nothing.

    Attributes:
        usable: a directory is given, and nothing went wrong with it.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.usable = directory is not None

    def load(self, key: str, source: ASTSource) -> CompiledKernel | None:
        """The kernel of an entry; None where there is none, or not as it was written."""
        if self.directory is None:
            return None
        entry = self.directory / key
        try:
            if not (entry / MANIFEST).exists():
                return None
            return CompiledKernel(source, _verified(entry), key)
        except Exception as error:  # whatever stands there, a kernel can be compiled instead
            logger.warning("Mjolnir: kernel cache entry %s is unreadable (%s); compiling it again", entry, error)
            return None

    def save(self, key: str, kernel: CompiledKernel) -> None:
        """Keep a kernel; readers see all of an entry or nothing."""
        if self.directory is None or not self.usable:
            return
        staging = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".new-", dir=self.directory))
            digests = {}
            for name, path in kernel.metadata_group.items():
                content = Path(path).read_bytes()
                digests[name] = _digest(content)
                (staging / name).write_bytes(content)
            (staging / MANIFEST).write_text(json.dumps(digests, indent=1))
            _publish(staging, self.directory / key)
        except OSError as error:
            self.usable = False
            logger.warning(
                "Mjolnir: kernel cache %s can't be written (%s); kernels are compiled at every start",
                self.directory,
                error,
            )
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)


def _verified(entry: Path) -> dict[str, str]:
    """Name and path of an entry's files; raises something where they are not what was written."""
    digests = json.loads((entry / MANIFEST).read_text())
    if not {".cubin", ".json"} <= {Path(name).suffix for name in digests}:
        raise ValueError(f"{MANIFEST} is not what was written")
    for name, digest in digests.items():
        if _digest((entry / name).read_bytes()) != digest:
            raise ValueError(f"{name} is not what was written")
    return {name: str(entry / name) for name in digests}


def _publish(staging: Path, entry: Path) -> None:
    try:
        staging.rename(entry)
    except OSError:
        with contextlib.suppress(Exception):
            _verified(entry)
            return  # another process was faster
        if entry.is_dir():  # corrupt
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        staging.rename(entry)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
