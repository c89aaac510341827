"""Many variants compiled at once, in processes of their own.

One thread at a time goes from Python to Triton's IR, so threads stop at about three cores. A process needs seconds to
import what it compiles with: for a few variants threads are faster.
"""

import logging
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from mjolnir.kernels.compiler import KernelCache, KernelVariant

logger = logging.getLogger("vllm.mjolnir")

FEWEST = 6  # variants that are worth a process


def compile_apart(
    variants: Iterable[KernelVariant], directory: Path | None, target: Any, *, processes: int | None = None
) -> int:
    """Compile what a kernel cache's directory lacks, so that a cache over it only loads.

    Whatever goes wrong in a process costs a warning: who wants the kernels compiles what is still missing.

    Args:
        variants: what will be wanted.
        directory: of the kernel cache; None compiles nothing.
        target: a ``GPUTarget``.
        processes: most processes; None for as many as this one may use cores.

    Returns:
        How many processes compiled.
    """
    if directory is None:
        return 0
    store = KernelCache(directory).store
    missing = [v for v in dict.fromkeys(variants) if store.load(v.key(target), v.source) is None]
    count = min(processes or len(os.sched_getaffinity(0)), len(missing) // FEWEST)
    if count < 2:
        return 0
    # Not forked: this process may have a CUDA context and threads.
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_compile, missing[place::count], directory, target) for place in range(count)]
        for part in parts:
            try:
                part.result()
            except Exception as error:  # the same variant will say it where it is needed
                logger.warning("Mjolnir: a process that compiled kernels failed: %s: %s", type(error).__name__, error)
    return count


def _compile(variants: Sequence[KernelVariant], directory: Path, target: Any) -> None:
    """In a process: fill the directory."""
    KernelCache(directory).precompile(variants, target)
