"""T5 beside existing decode-attention kernels over a paged cache, on one GPU: `mjolnir bench kernel`.

Each figure is a median over replays of a CUDA graph, every launch of which reads other, shuffled pages of a pool far
larger than the L2 cache. T5's launch is its plan and one layer. Every output is compared with attention in float32; a
kernel whose output is wrong gets no figure. The ceiling is the time of merely reading as many bytes, in the same run.
"""

import functools
import math
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mjolnir.bench.graph_timing import ReadCeiling, Timer, driver_version, rotated_buffers, time_launches
from mjolnir.bench.kernel_cells import LAYOUTS, POOL_BYTES, Cell, Shape, uniform
from mjolnir.bench.kernel_peers import Builder, Launch, importable, peer_versions
from mjolnir.bench.kernel_rows import T5, Measurement, Row, compared, place_of, progress, row, summary, table
from mjolnir.bench.results import versions, write_result
from mjolnir.bench.verify import Factory, attention, t5_runner, usable_device, wide_console
from mjolnir.errors import ConfigurationError
from mjolnir.layouts import split_kv
from mjolnir.reference import e2m3
from mjolnir.runner import DecodeRunner

if TYPE_CHECKING:
    from mjolnir.kernels.compiler import KernelVariant
    from mjolnir.kernels.tuning import StreamTuning


Q_DESCALE = 2.0  # a power of two: the bf16 query is exactly what the fp8 query stands for
DESCALES = {"fp8": (0.7, 1.3), "e2m3": (0.2, 0.4)}  # of K and V; any bytes make larger e2m3 than e4m3 values

# Largest ‖out - expected‖ / ‖expected‖. T5 rounds its output to bf16 and its weights to f16; some peers round theirs
# to e4m3, which is 3e-2.
LARGEST_ERROR = 1e-2
LARGEST_PEER_ERROR = 1e-1
CONTEXT_LOST = ("CUDA error", "Triton Error [CUDA]", "illegal memory access")  # every later call fails likewise
MOST_FAILURES = 2  # of a peer with one head shape and q_len, after which it is left out there


class Workload:
    """A cell's tensors on the pool's device: ``buffers`` block tables over disjoint, shuffled pages."""

    def __init__(self, cell: Cell, pool: torch.Tensor) -> None:
        """Lay a cell out in ``pool``, (bytes,) uint8, which holds it at least twice."""
        self.cell, self.device = cell, pool.device
        shape, batch = cell.shape, len(cell.batch.lengths)
        generator = torch.Generator(device=self.device).manual_seed(zlib.crc32(str(cell).encode()))
        total_pages = pool.numel() // cell.page_bytes
        heads = (shape.num_kv_heads, cell.page_size) if cell.layout == "HND" else (cell.page_size, shape.num_kv_heads)
        cache = pool[: total_pages * cell.page_bytes].view(total_pages, *heads, 2 * cell.row_bytes)
        self.kv = split_kv(cache, LAYOUTS[cell.layout], cell.row_bytes)
        counts = torch.tensor([-(-length // cell.page_size) for length in cell.batch.lengths], device=self.device)
        used = int(counts.sum())
        self.buffers = rotated_buffers(cell.footprint, pool.numel())
        shuffled = torch.randperm(total_pages, device=self.device, generator=generator).to(torch.int32)
        self.pages = list(shuffled[: self.buffers * used].split(used))
        self.tables = [_block_table(pages, counts) for pages in self.pages]
        tokens = (batch * cell.q_len, shape.num_heads, shape.head_size)
        self.query8 = torch.randn(tokens, device=self.device, generator=generator).to(torch.float8_e4m3fn)
        self.query = (self.query8.float() * Q_DESCALE).to(torch.bfloat16)
        self.out = torch.empty(tokens, dtype=torch.bfloat16, device=self.device)
        self.seq_lens = torch.tensor(cell.batch.lengths, dtype=torch.int32, device=self.device)
        self.query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * cell.q_len
        self.longest = max(cell.batch.lengths)
        self.softmax_scale = shape.head_size**-0.5
        self.q_descale = Q_DESCALE
        self.k_descale, self.v_descale = DESCALES[cell.kv_format]

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        """Output for buffer 0 in float32, the descale of V included."""
        outs = []
        for seq, length in enumerate(self.cell.batch.lengths):
            pages = self.tables[0][seq, : -(-length // self.cell.page_size)].long()
            keys, values = (self._values(cache[pages])[:length] for cache in (self.kv.k, self.kv.v))
            query = self.query[seq * self.cell.q_len : (seq + 1) * self.cell.q_len].float()
            scale = self.softmax_scale * self.k_descale
            outs.append(attention(query, keys, values, scale, causal=True)[0] * self.v_descale)
        return torch.cat(outs)

    def relative_error(self, launch: Launch) -> float:
        """‖out - expected‖ / ‖expected‖ on buffer 0; NaN where the kernel leaves an element unwritten."""
        launch.out.fill_(torch.nan)
        launch.run(0)
        return _distance(launch.out.float() * launch.factor, self.expected)

    def _values(self, pages: torch.Tensor) -> torch.Tensor:
        """(tokens, num_kv_heads, head_size) float32 of whole pages."""
        rows = pages.flatten(0, 1)
        if self.cell.kv_format == "e2m3":
            return e2m3.decode(e2m3.unpack(rows))
        return rows.view(torch.float8_e4m3fn).float()


def make_pool(device: torch.device, size: int = POOL_BYTES) -> torch.Tensor:
    """(size,) uint8: e4m3 bytes of normal values, which are also valid e2m3 rows."""
    pool = torch.empty(size, dtype=torch.uint8, device=device)
    for part in pool.split(1 << 27):
        part.copy_(torch.randn(part.numel(), device=device).to(torch.float8_e4m3fn).view(torch.uint8))
    return pool


def t5_launch(work: Workload, runner: DecodeRunner) -> Launch:
    """T5 on a workload: the plan of a step, and one layer."""
    plans = [runner.plan(work.seq_lens, table, q_len=work.cell.q_len, causal=True) for table in work.tables]
    k_scale, v_scale = (torch.full((1,), scale, device=work.device) for scale in (work.k_descale, work.v_descale))

    def run(buffer: int) -> None:
        runner.replan(plans[buffer])
        runner.run(plans[buffer], work.query, work.out, work.kv, k_scale, v_scale, work.softmax_scale)

    return Launch(run, work.out)


def compile_ahead(wanted: Iterable[tuple[Cell, "StreamTuning | None"]]) -> None:
    """Compile what cells need, on all cores at once; a tuning overrides a cell's own configuration."""
    from mjolnir.kernels.stream_runner import compile_for_device, variants_of  # noqa: PLC0415  (imports Triton)

    device = torch.device("cuda")
    pool = torch.zeros(1 << 29, dtype=torch.uint8, device=device)
    variants: list[KernelVariant] = []
    for cell, tuning in wanted:
        work = Workload(replace(cell, batch=uniform(len(cell.batch.lengths), 128)), pool)

        def use(runner: DecodeRunner, work: Workload = work) -> None:
            t5_launch(work, runner).run(0)

        variants += variants_of(cell.config(device), use, tuning=tuning)
    compile_for_device(variants)


def time_kernel(work: Workload, launch: Launch, largest_error: float, timer: Timer = time_launches) -> Measurement:
    """Check a kernel's output, and time it; after the replays its output must be what one launch gives."""
    error = work.relative_error(launch)
    if not error <= largest_error:
        return Measurement(relative_error=error, fault=f"relative error {error:.1e}; accepted: {largest_error:.0e}")
    timing = timer(launch.run, work.buffers, launch.out)
    replayed = launch.out.float().clone()
    launch.run(timing.last_buffer)
    changed = _distance(replayed, launch.out.float())
    if not changed <= largest_error:
        return Measurement(relative_error=error, fault=f"replays differ from a launch by {changed:.1e}")
    return Measurement(timing.us, timing.low_us, timing.high_us, error)


def measure(cell: Cell, runner: DecodeRunner, pool: torch.Tensor, *, timer: Timer = time_launches) -> Measurement:
    """Measure one runner in one cell.

    Args:
        cell: the cell.
        runner: built for the cell, see `Cell.config`.
        pool: what `make_pool` made.
        timer: what times the launches.
    """
    work = Workload(cell, pool)
    return time_kernel(work, t5_launch(work, runner), LARGEST_ERROR, timer)


class KernelBench:
    """Measures cells, T5 and its peers in each."""

    def __init__(
        self,
        pool: torch.Tensor,
        ceiling_us: Callable[[int], float],
        *,
        peers: Mapping[str, Builder] | None = None,
        factory: Factory = t5_runner,
        timer: Timer = time_launches,
    ) -> None:
        """Prepare for any number of cells.

        Args:
            pool: what `make_pool` made.
            ceiling_us: microseconds of reading a number of bytes, see `graph_timing.ReadCeiling`.
            peers: builders of other kernels, by name.
            factory: makes T5's runner.
            timer: what times the launches.
        """
        self._pool, self._ceiling_us = pool, ceiling_us
        self._peers, self._factory, self._timer = peers or {}, factory, timer
        self._failures: dict[tuple[str, Shape, int], int] = defaultdict(int)

    def run(self, cells: Sequence[Cell], seconds: float = math.inf) -> Iterator[list[Row]]:
        """Rows of each cell, until the cells, or the seconds, or the device is at its end."""
        deadline = time.monotonic() + seconds
        for cell in cells:
            if time.monotonic() >= deadline:
                return
            rows = self.cell_rows(cell)
            yield rows
            if any(words in row.get("fault", "") for row in rows for words in CONTEXT_LOST):
                return

    def cell_rows(self, cell: Cell) -> list[Row]:
        """Rows of one cell, T5's first."""
        work = Workload(cell, self._pool)
        ceiling_us = self._ceiling_us(cell.bytes)
        builders: dict[str, tuple[Builder, float]] = {
            T5: (lambda work: t5_launch(work, self._factory(cell.config(work.device))), LARGEST_ERROR)
        }
        for name, builder in self._peers.items() if cell.kv_format == "fp8" else ():
            if self._failures[name, cell.shape, cell.q_len] < MOST_FAILURES:
                builders[name] = builder, LARGEST_PEER_ERROR
        rows = []
        for name, (builder, largest_error) in builders.items():
            measurement = self._measured(work, builder, largest_error)
            self._failures[name, cell.shape, cell.q_len] += bool(measurement.fault)
            rows.append(row(cell, name, measurement, ceiling_us))
        return rows

    def _measured(self, work: Workload, builder: Builder, largest_error: float) -> Measurement:
        try:
            return time_kernel(work, builder(work), largest_error, self._timer)
        except Exception as error:  # a peer may refuse a shape in any way
            return Measurement(fault=f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200])


def main(cells: Sequence[Cell], *, peers: str, out: Path | None, seconds: float, command: str) -> bool:
    """Measure cells on this machine's GPU; the table goes to standard output, all else to standard error.

    Args:
        cells: what to measure.
        peers: ``auto`` for those that are installed, or ``none``.
        out: result file, written anew after each cell; None for none.
        seconds: after which no further cell is begun.
        command: the command that measures it again.

    Returns:
        Whether T5 was right wherever it was measured.

    Raises:
        ConfigurationError: there is no usable GPU, or an argument can't be used.
    """
    if peers not in ("auto", "none"):
        raise ConfigurationError(f"--peers {peers}: accepted: auto, none")
    if not seconds > 0:
        raise ConfigurationError(f"--time-budget {seconds:g}: accepted: seconds above 0")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigurationError(f"--out {out}: accepted: a file in a folder that exists")
    device = usable_device("cuda")
    found, missing = importable() if peers == "auto" else ({}, {})
    cells, notes = accepted_cells(cells, t5_runner, device)
    for note in (*notes, *(f"no {name}: {reason}" for name, reason in missing.items())):
        _say(note)
    pool = make_pool(device)
    compile_ahead((cell, None) for cell in cells)
    bench = KernelBench(pool, ReadCeiling(pool).us, peers=found, factory=t5_runner, timer=time_launches)
    rows: list[Row] = []
    done = 0
    for cell_rows in bench.run(cells, seconds):
        rows += cell_rows
        done += 1
        _say(f"{done} of {len(cells)}: {progress(cell_rows)}")
        if out is not None:
            write(out, rows, command=command, cells=len(cells), missing=missing)
    wide_console().print(table(rows))
    sys.stdout.write("".join(f"{line}\n" for line in summary(rows)))
    if done < len(cells):
        _say(
            f"stopped after {done} of {len(cells)} cells: {'the time is up' if _all_timed(rows) else 'see the faults'}"
        )
    return all(not row.get("fault") for row in rows if row["kernel"] == T5)


def accepted_cells(cells: Sequence[Cell], factory: Factory, device: torch.device) -> tuple[list[Cell], list[str]]:
    """The cells in a KV format that the runner takes, and why the others are left out."""
    refused: dict[str, str] = {}
    first = {cell.kv_format: cell for cell in reversed(cells)}
    for kv_format, cell in first.items():
        try:
            factory(cell.config(device))
        except ConfigurationError as error:
            refused[kv_format] = f"no {kv_format}: {error}"
    return [cell for cell in cells if cell.kv_format not in refused], list(refused.values())


def write(out: Path, rows: Sequence[Row], *, command: str, cells: int, missing: Mapping[str, str]) -> None:
    """Write what there is so far as a result file."""
    measured = len({(*place_of(row), row["kv"]) for row in rows})
    write_result(
        out,
        what="paged decode attention on a GPU, T5 beside existing kernels: medians over CUDA graph replays, nothing in "
        "the L2 cache; ratio = the best peer's time over T5's, over e2m3 that of T5 over fp8",
        command=command,
        rows=compared(rows),
        machine=f"{torch.cuda.get_device_name()}, driver {driver_version()}",
        versions={**versions(), "cuda": str(torch.version.cuda), **peer_versions()},
        cells={"measured": measured, "of": cells},
        summary=summary(rows),
        missing_peers=dict(missing),
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _all_timed(rows: Sequence[Row]) -> bool:
    return not any(words in row.get("fault", "") for row in rows for words in CONTEXT_LOST)


def _block_table(pages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(num_seqs, max_blocks) int32 of a flat list of pages; 0 past a sequence's end."""
    table = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32, device=pages.device)
    table[torch.arange(table.shape[1], device=pages.device) < counts[:, None]] = pages
    return table


def _distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())
