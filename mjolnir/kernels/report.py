"""The table of shipped kernels in ``docs/kernels.md``: ``python -m mjolnir.kernels.report [--write docs/kernels.md]``.

Compiles every shipped variant for each architecture and counts what its machine code is made of. Needs no GPU.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from triton.backends.compiler import GPUTarget

from mjolnir.errors import ConfigurationError
from mjolnir.kernels.compiler import KernelCache, KernelVariant
from mjolnir.kernels.inspection import InstructionCounts, KernelInspection, inspect
from mjolnir.kernels.shipped import shipped_variants

ARCHITECTURES = (90, 110)  # H200, where it is measured; Thor
BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"
LOOP_KINDS = (
    "LDG.128", "LDG other", "LDGSTS", "LDS", "LDSM", "STS", "STSM", "MMA", "F2FP", "PRMT", "SHFL", "BAR",
)  # fmt: skip
COLUMNS = ("kernel", "sm", "registers", "spilled B", "shared B", "instructions", "in the loop", *LOOP_KINDS)


def inspect_variants(
    variants: Iterable[KernelVariant], arch: int, cache: KernelCache, *, workers: int = 1
) -> list[tuple[str, KernelInspection]]:
    """Label and inspection of each variant, compiled for a compute capability."""
    variants = list(variants)
    kernels = cache.precompile(variants, GPUTarget("cuda", arch, 32), workers=workers)
    with ThreadPoolExecutor(workers) as pool:  # they wait for the disassemblers
        inspections = list(pool.map(inspect, kernels))
    return [(variant.label, found) for variant, found in zip(variants, inspections, strict=True)]


def table(results: Iterable[tuple[str, KernelInspection]]) -> str:
    """A markdown table, one row a result.

    From "in the loop" on, instructions of the loop that multiplies matrices, or of the whole kernel where none does.
    """
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(_row(label, inspection)) + " |" for label, inspection in results]
    return "\n".join(lines)


def replace_section(page: str, content: str) -> str:
    """A page with ``content`` between `BEGIN` and `END`.

    Raises:
        ConfigurationError: the page does not have each of the two marks once, in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ConfigurationError(f"the page's marks: accepted: {BEGIN} and {END}, each once")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(prog="python -m mjolnir.kernels.report", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in this page")
    parser.add_argument("--workers", type=int, default=2, help="threads that compile")
    options = parser.parse_args(arguments)
    cache = KernelCache(None)
    results = [
        result
        for arch in ARCHITECTURES
        for result in inspect_variants(shipped_variants(arch), arch, cache, workers=options.workers)
    ]
    content = table(sorted(results, key=lambda result: result[0]))
    if options.write is None:
        sys.stdout.write(content + "\n")
    else:
        options.write.write_text(replace_section(options.write.read_text(), content))
    return 0


def _row(label: str, inspection: KernelInspection) -> list[str]:
    loop = inspection.hot_loop
    numbers = [
        inspection.arch,
        inspection.registers,
        inspection.local_bytes,
        inspection.shared_bytes,
        inspection.instructions.total,
        loop.total if loop else "-",
        *(_number(loop or inspection.instructions, kind) for kind in LOOP_KINDS),
    ]
    return [label, *map(str, numbers)]


def _number(counts: InstructionCounts, kind: str) -> int:
    return counts.matrix if kind == "MMA" else counts[kind]


if __name__ == "__main__":
    sys.exit(main())
