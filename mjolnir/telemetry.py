"""The counters of this process: one file, made on first use by the process that runs the layers."""

import logging
import os
import sys

from mjolnir import names
from mjolnir.counters import CounterFile, GroupInfo
from mjolnir.names import KernelSource

logger = logging.getLogger("vllm.mjolnir")

_counters: dict[int, CounterFile] = {}
_groups: dict[str, GroupInfo] = {}
_kernels: dict[KernelSource, int] = {}  # counted already; what a forked child has from its parent is the parent's


def process_counters() -> CounterFile:
    """The counters file of this process; a forked child gets its own."""
    pid = os.getpid()
    if pid not in _counters:
        directory = os.environ.get(names.STATS_DIR_VARIABLE, "").strip() or names.DEFAULT_STATS_DIR
        _counters.clear()
        _groups.clear()
        counters = CounterFile(directory, rank=_rank())
        if counters.error:
            logger.warning("Mjolnir: steps are counted but can't be read from outside: %s", counters.error)
        _counters[pid] = counters
    return _counters[pid]


def publish_group(info: GroupInfo) -> None:
    """Show an attention group in the counters file; vLLM makes every builder twice, so the last one counts."""
    counters = process_counters()
    _groups[info.group] = info
    counters.set_groups(sorted(_groups.values(), key=lambda group: group.group))


def count_kernels() -> None:
    """Bring the counts of kernels up to what this process has compiled and loaded so far."""
    compiler = sys.modules.get("mjolnir.kernels.compiler")  # imported where there are kernels
    if compiler is None:
        return
    counters = process_counters()
    for source in KernelSource:
        new = int(compiler.CACHE_STATS[source]) - _kernels.get(source, 0)
        if new:
            counters.kernels(source, new)
            _kernels[source] = _kernels.get(source, 0) + new


def _rank() -> int:
    """This process's rank among the workers of its engine; 0 outside of one."""
    from torch import distributed  # noqa: PLC0415  (torch is loaded long before any counting)

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
