"""Is an installed vLLM one that the image can be built on? Asked before anything is changed.

``python -m appliance.image_check thor|cpu`` checks the version of vLLM and, for ``thor``, that its core extensions hold
machine code for sm_110. Code for another architecture does not run there, so a base without it fails at build time
with one line and not on the board with "no kernel image".

The architectures come from ``cuobjdump`` where there is one, else from the fat binaries themselves: a container starts
with the magic number 0xBA55ED50, and each of its entries names kind (PTX or machine code) and architecture. Standard
library only, since this runs in a bare base.
"""

import argparse
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.patchqueue import REPOSITORY, Upstream, check_version, find_root, load_queue

THOR = 110
TARGETS = ("thor", "cpu")
# Without these no model runs. The others (FlashMLA, FA2, FA3 and so on) are chosen by architecture.
CORE = ("_C.abi3.so", "_C_stable_libtorch.abi3.so", "_moe_C.abi3.so", "_moe_C_stable_libtorch.abi3.so")

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header's bytes, bytes of all entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, header's bytes, payload's bytes
_ARCHITECTURE = 28  # offset in an entry
_MACHINE_CODE = 2
_LISTED = re.compile(r"\.sm_(\d+)[a-z]?\.cubin")


class BaseImageError(ApplianceError):
    """A base that the image can't be built on: says what is wrong with it and what is accepted."""


def scan(data: bytes) -> Counter[int]:
    """How many pieces of machine code a library holds, by architecture (110 for sm_110 and sm_110a).

    PTX is not counted. A container that ends before its header says so is read as far as it goes.
    """
    found: Counter[int] = Counter()
    start = data.find(_MAGIC)
    while start >= 0:
        end = start + len(_MAGIC)
        if start + _CONTAINER.size <= len(data):
            _, _, header, size = _CONTAINER.unpack_from(data, start)
            if header == _CONTAINER.size:
                end = min(start + header + size, len(data))
                found.update(_entries(data, start + header, end))
        start = data.find(_MAGIC, end)
    return found


def _entries(data: bytes, start: int, end: int) -> list[int]:
    found = []
    while start + _ARCHITECTURE + 4 <= end:
        kind, _, header, size = _ENTRY.unpack_from(data, start)
        if header <= _ARCHITECTURE:
            break
        if kind == _MACHINE_CODE:
            found.append(struct.unpack_from("<I", data, start + _ARCHITECTURE)[0])
        start += header + size
    return found


def architectures(library: Path, cuobjdump: str | None = None) -> Counter[int]:
    """How many pieces of machine code a library holds, by architecture.

    Args:
        library: shared object.
        cuobjdump: program that lists them; None reads the library itself.

    Raises:
        BaseImageError: the library can't be read, or the program failed.
    """
    if cuobjdump is None:
        try:
            return scan(library.read_bytes())
        except OSError as error:
            raise BaseImageError(f"{library}: can't be read: {error.strerror}") from None
    result = subprocess.run([cuobjdump, "--list-elf", str(library)], capture_output=True, text=True, check=False)
    if result.returncode != 0 and "does not contain device code" not in result.stdout + result.stderr:
        raise BaseImageError(f"{cuobjdump} --list-elf {library} failed: {(result.stderr or result.stdout).strip()}")
    return Counter(int(number) for number in _LISTED.findall(result.stdout))


def check_kernels(root: Path, cuobjdump: str | None = None) -> str:
    """Check that vLLM's core extensions run on Thor; returns one line with their counts.

    Args:
        root: site-packages folder.
        cuobjdump: program that lists machine code; None reads the libraries themselves.

    Raises:
        BaseImageError: there is no core extension, or one of them has no code for sm_110.
    """
    libraries = [root / "vllm" / name for name in CORE if (root / "vllm" / name).is_file()]
    if not libraries:
        raise BaseImageError(f"{root}: vLLM has no CUDA extension ({', '.join(CORE)}); accepted: a build for CUDA 13")
    counts = []
    for library in libraries:
        found = architectures(library, cuobjdump)
        if not found[THOR]:
            others = ", ".join(f"sm_{number}" for number in sorted(found)) or "none for a GPU"
            raise BaseImageError(f"{library.name}: no sm_{THOR} code; found: {others}; accepted: a base for CUDA 13")
        counts.append(f"{found[THOR]} in {library.name}")
    return f"sm_{THOR} code: {', '.join(counts)}"


def check(target: str, root: Path, upstream: Upstream, cuobjdump: str | None = None) -> list[str]:
    """All checks of a base; one line for each.

    Args:
        target: thor or cpu.
        root: site-packages folder.
        upstream: what the patch queue is made for.
        cuobjdump: program that lists machine code; None reads the libraries themselves.

    Raises:
        PatchError: there is no vLLM, or one of another version.
        BaseImageError: vLLM's extensions do not run on Thor.
    """
    check_version(root, upstream)
    lines = [f"vLLM {upstream.version} in {root}"]
    if target == "thor":
        lines.append(check_kernels(root, cuobjdump))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Check one base; 0 when it fits, 1 with one line on stderr when not."""
    parser = argparse.ArgumentParser(prog="python -m appliance.image_check", description="Checks an image's base.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--root", type=Path, help="site-packages folder (default: this interpreter's vLLM)")
    parser.add_argument("--queue", type=Path, default=REPOSITORY / "patches", help="folder with the series")
    arguments = parser.parse_args(argv)
    try:
        root = arguments.root or find_root()
        lines = check(arguments.target, root, load_queue(arguments.queue).upstream, shutil.which("cuobjdump"))
    except ApplianceError as error:
        sys.stderr.write(f"this base can't be used: {error}\n")
        return error.exit_code
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
