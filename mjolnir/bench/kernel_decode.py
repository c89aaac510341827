"""T5 beside existing decode-attention kernels over a paged cache, on one GPU: `mjolnir bench kernel`.

Each figure is a median over replays of a CUDA graph, every launch of which reads other, shuffled pages of a pool far
larger than the L2 cache. T5's launch is its plan and one layer. Every output is compared with attention in float32; a
kernel whose output is wrong gets no figure. The ceiling is the time of merely reading as many bytes, in the same run.
"""

import functools
import math
import os
import statistics
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from mjolnir.bench.graph_timing import ReadCeiling, Timer, driver_version, rotated_buffers, time_launches
from mjolnir.bench.kernel_peers import Builder, Launch, importable, peer_versions
from mjolnir.bench.results import versions, write_result
from mjolnir.bench.verify import Factory, attention, t5_runner, usable_device, wide_console
from mjolnir.errors import ConfigurationError
from mjolnir.layouts import split_kv
from mjolnir.reference import e2m3
from mjolnir.runner import HEAD_SIZES, PAGE_SIZES, DecodeRunner, RunnerConfig

if TYPE_CHECKING:
    from mjolnir.kernels.compiler import KernelVariant
    from mjolnir.kernels.tuning import StreamTuning

POOL_BYTES = 1 << 31
LAYOUTS = {"NHD": "BNH2D", "HND": "BHN2D"}
KV_FORMATS = ("fp8", "e2m3")
T5 = "T5"

Q_DESCALE = 2.0  # a power of two: the bf16 query is exactly what the fp8 query stands for
DESCALES = {"fp8": (0.7, 1.3), "e2m3": (0.2, 0.4)}  # of K and V; any bytes make larger e2m3 than e4m3 values

# Largest ‖out - expected‖ / ‖expected‖. T5 rounds its output to bf16 and its weights to f16; some peers round theirs
# to e4m3, which is 3e-2.
LARGEST_ERROR = 1e-2
LARGEST_PEER_ERROR = 1e-1
CONTEXT_LOST = ("CUDA error", "Triton Error [CUDA]", "illegal memory access")  # every later call fails likewise
MOST_FAILURES = 2  # of a peer with one head shape and q_len, after which it is left out there

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}x{self.num_kv_heads}x{self.head_size}"


@dataclass(frozen=True)
class Batch:
    """Sequences of a step, by their lengths in tokens."""

    name: str
    lengths: tuple[int, ...]


def uniform(sequences: int, context: int) -> Batch:
    """A batch of sequences of one length."""
    return Batch(f"{sequences}x{context}", (context,) * sequences)


SHAPES = (Shape(32, 8, 128), Shape(24, 4, 256), Shape(64, 8, 128), Shape(9, 3, 64))
SKEWED = Batch("1x131072+31x1024", (131072, *(1024,) * 31))
BALANCED = Batch("32x5088", (5088,) * 32)  # as many tokens
UNIFORM = tuple(
    uniform(*pair)
    for pair in ((1, 4096), (1, 32768), (1, 131072), (4, 8192), (4, 32768), (16, 4096), (16, 16384), (64, 2048))
)
BATCHES = {
    "all": (*UNIFORM, SKEWED, BALANCED),
    "quick": (UNIFORM[0], UNIFORM[4], UNIFORM[7]),
    "skewed": (SKEWED, BALANCED),
}


@dataclass(frozen=True)
class Cell:
    """What is measured: one decode step.

    Attributes:
        shape: its heads.
        batch: its sequences.
        q_len: query tokens of each sequence.
        page_size: tokens of a page.
        layout: ``NHD`` or ``HND``, order of a page's dimensions; K and V of a token are side by side.
        kv_format: ``fp8`` or ``e2m3``.
    """

    shape: Shape
    batch: Batch
    q_len: int = 1
    page_size: int = 16
    layout: str = "NHD"
    kv_format: str = "fp8"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of K, or of V."""
        return self.shape.head_size if self.kv_format == "fp8" else e2m3.row_bytes(self.shape.head_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_size * self.shape.num_kv_heads * 2 * self.row_bytes

    @property
    def footprint(self) -> int:
        """Bytes of the pages that hold the cell."""
        return sum(-(-length // self.page_size) for length in self.batch.lengths) * self.page_bytes

    @property
    def bytes(self) -> int:
        """Bytes of K and V that a step must read."""
        return sum(self.batch.lengths) * self.shape.num_kv_heads * 2 * self.row_bytes

    def config(self, device: torch.device) -> RunnerConfig:
        """The configuration of a runner for this cell."""
        shape = self.shape
        return RunnerConfig(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            self.page_size,
            torch.bfloat16,
            len(self.batch.lengths),
            device,
            max_q_len=self.q_len,
            q_dtype="bf16",
            kv_format=self.kv_format,
        )

    def __str__(self) -> str:
        pages = f"pages of {self.page_size} {self.layout} {self.kv_format}"
        return f"{self.shape} {self.batch.name} q_len {self.q_len} {pages}"


@dataclass(frozen=True)
class Measurement:
    """What a kernel gave in a cell.

    Attributes:
        us: median time of a launch; None where the output is wrong or the kernel failed.
        low_us: least.
        high_us: most.
        relative_error: ‖out - expected‖ / ‖expected‖.
        fault: why there is no time; empty where there is.
    """

    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    relative_error: float | None = None
    fault: str = ""


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
    from mjolnir.kernels.stream_runner import process_cache, variants_of  # noqa: PLC0415  (imports Triton)

    device = torch.device("cuda")
    pool = torch.zeros(1 << 29, dtype=torch.uint8, device=device)
    variants: list[KernelVariant] = []
    for cell, tuning in wanted:
        work = Workload(replace(cell, batch=uniform(len(cell.batch.lengths), 128)), pool)

        def use(runner: DecodeRunner, work: Workload = work) -> None:
            t5_launch(work, runner).run(0)

        variants += variants_of(cell.config(device), use, tuning=tuning)
    process_cache().precompile(variants, workers=os.cpu_count() or 1)


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


def row(cell: Cell, kernel: str, measurement: Measurement, ceiling_us: float) -> Row:
    """One kernel's figures in one cell."""
    us = measurement.us
    figures: Row = {
        "shape": str(cell.shape),
        "batch": cell.batch.name,
        "q_len": cell.q_len,
        "page_size": cell.page_size,
        "layout": cell.layout,
        "kv": cell.kv_format,
        "bytes": cell.bytes,
        "kernel": kernel,
        "us": _rounded(us, 2),
        "low_us": _rounded(measurement.low_us, 2),
        "high_us": _rounded(measurement.high_us, 2),
        "ceiling_us": round(ceiling_us, 2),
        "of_ceiling": None if us is None else round(ceiling_us / us, 3),
        "relative_error": _rounded(measurement.relative_error, 6),
    }
    return {**figures, "fault": measurement.fault} if measurement.fault else figures


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows, T5's with what they are compared to: ``ratio`` is the other's time over T5's, above 1 in T5's favour.

    Over an fp8 cache the other is the best peer in the same cell, ``best_peer``; over an e2m3 cache it is T5 over
    an fp8 cache. ``of_balanced`` is T5's time for the balanced batch over that for the skewed one.
    """
    times = {(*_place(row), row["kv"], row["kernel"]): row["us"] for row in rows if row["us"] is not None}
    result = []
    for original in rows:
        row = dict(original)
        if row["kernel"] == T5 and row["us"] is not None:
            place = _place(row)
            row |= _against_other(times, place, row)
            balanced = times.get((place[0], BALANCED.name, *place[2:], row["kv"], T5))
            if row["batch"] == SKEWED.name and balanced:
                row["of_balanced"] = round(balanced / row["us"], 3)
        result.append(row)
    return result


def summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means of what `compared` found, one line each."""
    ours = [row for row in compared(rows) if row["kernel"] == T5]
    fp8 = [row for row in ours if row["kv"] == "fp8"]
    lines = []
    for q_len in sorted({row["q_len"] for row in ours}):
        named: dict[str, list[Any]] = {
            "of the read ceiling": [row.get("of_ceiling") for row in fp8 if row["q_len"] == q_len],
            "times as fast as the best peer": [row.get("ratio") for row in fp8 if row["q_len"] == q_len],
            "times as fast, each at its best page size and layout": _at_their_best(rows, q_len),
            "times as fast over e2m3 as over fp8": [
                row.get("ratio") for row in ours if row["kv"] == "e2m3" and row["q_len"] == q_len
            ],
            "of the balanced batch's speed on the skewed one": [
                row.get("of_balanced") for row in fp8 if row["q_len"] == q_len
            ],
        }
        for what, values in named.items():
            known = [value for value in values if value is not None]
            if known:
                mean, span = geometric_mean(known), f"{min(known):.2f} to {max(known):.2f}"
                lines.append(f"q_len {q_len}: T5 {mean:.2f} {what} (geometric mean of {len(known)}: {span})")
    return lines


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def table(rows: Sequence[Row]) -> Table:
    """T5's rows for a terminal."""
    columns = ("shape", "batch", "q_len", "page_size", "layout", "kv", "us", "of_ceiling", "best_peer", "best_peer_us")
    rendered = Table(*(column.replace("_", " ") for column in columns), "ratio", "error", box=None)
    for row in compared(rows):
        if row["kernel"] == T5:
            error = "" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
            values = [_cell(row.get(column)) for column in (*columns, "ratio")]
            rendered.add_row(*values, f"[red]{row['fault']}[/]" if row.get("fault") else error)
    return rendered


def parse_cells(
    shapes: str = "",
    q_len: str = "1,4",
    page: str = "16,128",
    cells: str = "all",
    layout: str = "NHD",
    kv: str = "fp8,e2m3",
) -> list[Cell]:
    """Cells from a command line's words; for each head shape the batches come innermost.

    Raises:
        ConfigurationError: a word that can't be used.
    """
    if cells not in BATCHES:
        raise ConfigurationError(f"--cells {cells}: accepted: {', '.join(BATCHES)}")
    heads: Sequence[Shape] = _words("--shapes", shapes, _shape) if shapes else SHAPES
    parsed = [
        Cell(shape, batch, q, page_size, order, kv_format)
        for shape in heads
        for q in _words("--q-len", q_len, lambda word: _number(word, range(1, 33)))
        for page_size in _words("--page", page, lambda word: _number(word, PAGE_SIZES))
        for order in _words("--layout", layout, lambda word: _choice(word, tuple(LAYOUTS)))
        for kv_format in _words("--kv", kv, lambda word: _choice(word, KV_FORMATS))
        for batch in BATCHES[cells]
    ]
    for cell in parsed:
        if 2 * cell.footprint > POOL_BYTES:
            raise ConfigurationError(f"{cell}: {cell.footprint} bytes; accepted: {POOL_BYTES // 2}, half of the pool")
    return parsed


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


def progress(rows: Sequence[Row]) -> str:
    """A cell's rows in one line."""
    place = rows[0]
    figures = ", ".join(f"{row['kernel']} {row.get('fault') or row['us']}" for row in rows)
    pages = f"pages of {place['page_size']} {place['layout']} {place['kv']}"
    return f"{place['shape']} {place['batch']} q_len {place['q_len']} {pages}: us: {figures}"


def write(out: Path, rows: Sequence[Row], *, command: str, cells: int, missing: Mapping[str, str]) -> None:
    """Write what there is so far as a result file."""
    measured = len({(*_place(row), row["kv"]) for row in rows})
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


def _words(option: str, text: str, parse: Callable[[str], Any]) -> list[Any]:
    """What ``parse`` makes of each word between commas; it raises ValueError with what is accepted."""
    try:
        return [parse(word.strip()) for word in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"{option} {text}: {error}") from None


def _shape(word: str) -> Shape:
    parts = word.split("x")
    if len(parts) == 3 and all(part.isdecimal() and int(part) for part in parts):
        shape = Shape(*map(int, parts))
        if shape.num_heads % shape.num_kv_heads == 0 and shape.head_size in HEAD_SIZES:
            return shape
    sizes = ", ".join(map(str, HEAD_SIZES))
    raise ValueError(f"accepted: HEADSxKV_HEADSxHEAD_SIZE as 32x8x128, whole heads a KV head, head sizes {sizes}")


def _number(word: str, accepted: Sequence[int]) -> int:
    if word.isdecimal() and int(word) in accepted:
        return int(word)
    span = f"{accepted[0]} to {accepted[-1]}" if isinstance(accepted, range) else ", ".join(map(str, accepted))
    raise ValueError(f"accepted: {span}")


def _choice(word: str, accepted: Sequence[str]) -> str:
    if word not in accepted:
        raise ValueError(f"accepted: {', '.join(accepted)}")
    return word


def _place(row: Row) -> tuple[Any, ...]:
    return row["shape"], row["batch"], row["q_len"], row["page_size"], row["layout"]


def _against_other(times: Mapping[tuple[Any, ...], float], place: tuple[Any, ...], row: Row) -> Row:
    if row["kv"] == "fp8":
        others = {key[-1]: us for key, us in times.items() if key[:-2] == place and key[-2] == "fp8" and key[-1] != T5}
    else:
        known = times.get((*place, "fp8", T5))
        others = {} if known is None else {"T5 over fp8": known}
    if not others:
        return {}
    best = min(others, key=lambda name: others[name])
    return {"best_peer": best, "best_peer_us": others[best], "ratio": round(others[best] / row["us"], 3)}


def _at_their_best(rows: Sequence[Row], q_len: int) -> list[float]:
    """Best peer's time over T5's for each shape and batch, each at its best page size and layout."""
    best: dict[tuple[str, str, bool], float] = defaultdict(lambda: math.inf)
    for row in rows:
        if row["kv"] == "fp8" and row["q_len"] == q_len and row["us"] is not None:
            key = row["shape"], row["batch"], row["kernel"] == T5
            best[key] = min(best[key], row["us"])
    ours = {key[:2]: us for key, us in best.items() if key[2]}
    return [best[*key, False] / us for key, us in ours.items() if (*key, False) in best]


def _block_table(pages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(num_seqs, max_blocks) int32 of a flat list of pages; 0 past a sequence's end."""
    table = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32, device=pages.device)
    table[torch.arange(table.shape[1], device=pages.device) < counts[:, None]] = pages
    return table


def _distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def _rounded(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
