"""What a compiled kernel's machine code looks like: registers, spills, shared memory, instructions by kind.

Reads the cubin with the disassemblers that Triton brings along. They need no GPU; Triton 3.6's do not know sm_110.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton

from mjolnir.errors import KernelInspectionError

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Kinds of instructions by the beginning of their names; the first that fits counts.
KINDS = (
    ("LDG.128", re.compile(r"LDG\b.*\.128\b")),
    ("LDG other", re.compile(r"LDG\b")),
    ("LDGSTS", re.compile(r"LDGSTS\b")),
    ("TMA", re.compile(r"UTMALDG\b|UBLKCP\b")),
    ("STG", re.compile(r"STG\b")),
    ("LDL", re.compile(r"LDL\b")),
    ("STL", re.compile(r"STL\b")),
    ("LDSM", re.compile(r"LDSM\b")),
    ("LDS", re.compile(r"LDS\b")),
    ("STSM", re.compile(r"STSM\b")),
    ("STS", re.compile(r"STS\b")),
    ("HMMA", re.compile(r"HMMA\b")),
    ("QMMA", re.compile(r"QMMA\b|OMMA\b")),
    ("GMMA", re.compile(r"[HQ]GMMA\b")),
    ("UTCMMA", re.compile(r"UTC[A-Z]*MMA\b")),
    ("F2FP", re.compile(r"F2FP\b")),
    ("PRMT", re.compile(r"PRMT\b")),
    ("SHFL", re.compile(r"SHFL\b")),
    ("BAR", re.compile(r"BAR\b")),
    ("SYNCS", re.compile(r"SYNCS\b")),
    ("MUFU", re.compile(r"MUFU\b")),
)
MATRIX_KINDS = ("HMMA", "QMMA", "GMMA", "UTCMMA")
# /*03b0*/  @!P1 BRA `(.L_x_0) ;
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_.]*)(?P<rest>[^;]*);"
)
_LABEL = re.compile(r"^(\.L_x_\w+):")
_TARGET = re.compile(r"`\((\.L_x_\w+)\)")
_RESOURCES = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class InstructionCounts:
    """Instructions of a piece of machine code, counted as they stand, not as often as they run.

    Attributes:
        total: all of them; those that only fill up the end of the code are left out.
        by_kind: how many of each of `KINDS`; no entry for a kind without any.
    """

    total: int
    by_kind: tuple[tuple[str, int], ...]

    def __getitem__(self, kind: str) -> int:
        if kind not in dict(KINDS):
            raise KeyError(kind)
        return dict(self.by_kind).get(kind, 0)

    @property
    def matrix(self) -> int:
        """Matrix multiplications of any kind."""
        return sum(self[kind] for kind in MATRIX_KINDS)


@dataclass(frozen=True)
class KernelInspection:
    """A compiled kernel's resources and instructions.

    Attributes:
        name: the kernel's symbol.
        arch: compute capability, 90 or 110.
        registers: of a thread.
        local_bytes: local memory of a thread; with Triton these are spilled registers.
        shared_bytes: shared memory of a program, as it is launched.
        threads: of a program.
        instructions: of the whole kernel.
        hot_loop: of the innermost loop with most matrix multiplications (of equals the shortest: the others mask as
            well); None where no loop has any.
    """

    name: str
    arch: int
    registers: int
    local_bytes: int
    shared_bytes: int
    threads: int
    instructions: InstructionCounts
    hot_loop: InstructionCounts | None


def inspect(kernel: Any) -> KernelInspection:
    """Inspect a Triton ``CompiledKernel``.

    Raises:
        KernelInspectionError: a disassembler is missing, or does not know the architecture.
    """
    with tempfile.TemporaryDirectory(prefix="mjolnir-cubin-") as scratch:
        cubin = Path(scratch) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        resources = _output("cuobjdump", "-res-usage", str(cubin))
        listing = Listing(_output("nvdisasm", "-c", str(cubin)))
    registers, local = _resources(resources, kernel.name)
    warps, metadata = kernel.metadata.num_warps, kernel.metadata
    return KernelInspection(
        name=kernel.name,
        arch=metadata.target.arch,
        registers=registers,
        local_bytes=local,
        shared_bytes=metadata.shared,
        threads=32 * warps,
        instructions=listing.counts,
        hot_loop=listing.hot_loop,
    )


class Listing:
    """The instructions and loops in the text that ``nvdisasm -c`` prints."""

    def __init__(self, text: str) -> None:
        self.names: list[str] = []  # of all instructions, with their modifiers
        self._branches: list[tuple[int, str]] = []  # place and label
        self._labels: dict[str, int] = {}  # the place of the instruction that follows
        for line in text.splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        if label := _LABEL.match(line):
            self._labels[label[1]] = len(self.names)
        elif instruction := _INSTRUCTION.match(line):
            name = instruction["name"]
            if name.startswith("BRA") and (target := _TARGET.search(instruction["rest"])):
                self._branches.append((len(self.names), target[1]))
            self.names.append(name)

    @cached_property
    def loops(self) -> list[range]:
        """Places of each loop: from where a backward branch leads to the branch. Not the one that ends a kernel."""
        found = []
        for place, label in self._branches:
            begin = self._labels.get(label, place + 1)
            if begin < place:
                found.append(range(begin, place + 1))
        return found

    @cached_property
    def counts(self) -> InstructionCounts:
        """Of the whole listing."""
        return count(name for name in self.names if name != "NOP")

    @cached_property
    def hot_loop(self) -> InstructionCounts | None:
        """See `KernelInspection.hot_loop`."""
        innermost = [
            loop
            for loop in self.loops
            if not any(_inside(other, loop) and self._at(other).matrix for other in self.loops)
        ]
        counted = [counts for counts in map(self._at, innermost) if counts.matrix]
        return max(counted, key=lambda counts: (counts.matrix, -counts.total), default=None)

    def _at(self, places: range) -> InstructionCounts:
        return count(self.names[place] for place in places if self.names[place] != "NOP")


def count(names: Iterable[str]) -> InstructionCounts:
    """Count instruction names by kind."""
    names = list(names)
    tally = Counter(kind for name in names for kind in _kind(name))
    return InstructionCounts(len(names), tuple((kind, tally[kind]) for kind, _ in KINDS if tally[kind]))


def _kind(name: str) -> Iterator[str]:
    for kind, pattern in KINDS:
        if pattern.match(name):
            yield kind
            return


def _inside(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop


def _resources(text: str, name: str) -> tuple[int, int]:
    """Registers and bytes of local memory of a function, from ``cuobjdump -res-usage``."""
    for function, registers, stack, local in _RESOURCES.findall(text):
        if function == name:
            return int(registers), int(stack) + int(local)
    raise KernelInspectionError(f"cuobjdump tells nothing of {name}: {text.strip()[-200:]}")


def _output(program: str, *arguments: str) -> str:
    try:
        result = subprocess.run([str(BINARIES / program), *arguments], capture_output=True, text=True, check=True)
    except OSError as error:
        raise KernelInspectionError(f"{program}: {error}") from None
    except subprocess.CalledProcessError as error:
        raise KernelInspectionError(f"{program}: {error.stderr.strip() or error.stdout.strip()}") from None
    return result.stdout
