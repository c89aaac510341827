"""Before serving: does T5, on this device and for this model's shapes, compute attention?

Random small pages go through every variant that an attention group can launch, and the results are compared with a
float64 oracle on the host. A kernel that was miscompiled, a driver that is broken, or a kernel cache with the code of
another machine in it, shows here and not in what users read. What fails stays on the fallback.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mjolnir.layouts import PagedKV, split_kv
from mjolnir.reference import e2m3
from mjolnir.reference.attention import dequantised
from mjolnir.runner import DecodeRunner, RunnerConfig

NAN_BYTE = 0x7F  # of an unused e4m3 row: an output that is NaN has read it
LENGTHS = (300, 17, 0, 129, 64, 33)  # tokens, a padding row among them; repeated to the size of a batch
# Largest relative error of an output row. Measured: 2e-3 to 5e-3 with Q as it comes, to 5e-2 with Q in e4m3.
TOLERANCE = {"bf16": 3e-2, "fp8": 0.15}


@dataclass(frozen=True)
class Outcome:
    """What a self-test found.

    Attributes:
        steps: steps that were compared.
        error: largest relative error of an output row.
        seconds: time it took, compilations not counted.
        compiling: seconds that compilations took.
        failure: what went wrong; empty where nothing did.
    """

    steps: int
    error: float
    seconds: float
    failure: str = ""
    compiling: float = 0.0


@dataclass(frozen=True)
class Pages:
    """Random sequences in pages.

    Attributes:
        kv: views of the cache, on the device.
        block_table: (num_seqs, max_blocks) int32, on the device.
        seq_lens: (num_seqs,) int32, on the device.
        keys: (length, num_kv_heads, head_size) float64 of each sequence, on the host.
        values: likewise.
        k_scale: what the runner gets, on the device; in ``keys`` already.
        v_scale: likewise.
    """

    kv: PagedKV
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_scale: torch.Tensor
    v_scale: torch.Tensor


_outcomes: dict[tuple[RunnerConfig, bool], Outcome] = {}


def run(runner: DecodeRunner, token_major: bool) -> Outcome:
    """Test a runner; once a process for each configuration, since vLLM makes every builder twice.

    Args:
        runner: not in use yet.
        token_major: whether the cache holds all heads of a token side by side, else all tokens of a head.
    """
    key = runner.config, token_major
    if key not in _outcomes:
        _outcomes[key] = _run(runner, token_major)
    return _outcomes[key]


def _run(runner: DecodeRunner, token_major: bool) -> Outcome:
    began, compiled = time.perf_counter(), _compile_seconds()
    worst, steps, failure = 0.0, 0, ""
    try:
        for error, where in _errors(runner, token_major):
            worst, steps = max(worst, error), steps + 1
            if not error <= TOLERANCE[runner.config.q_dtype]:  # NaN fails too
                failure = f"self-test failed: relative error {error:.3g} at {where}"
                break
    except Exception as error:  # whatever a compiler, a driver or a kernel raises, the fallback can serve instead
        failure = f"self-test failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
    compiling = _compile_seconds() - compiled
    return Outcome(steps, worst, time.perf_counter() - began - compiling, failure, compiling)


def _errors(runner: DecodeRunner, token_major: bool) -> Iterator[tuple[float, str]]:
    """The error of each step, and what step it was."""
    for q_len, num_seqs in _batches(runner):
        pages = random_pages(runner.config, num_seqs, q_len, token_major)
        for causal in sorted({True, q_len == 1}):
            where = f"q_len {q_len}, {num_seqs} sequences{'' if causal else ', not causal'}"
            yield _row_error(runner, pages, q_len, causal), where


def _compile_seconds() -> float:
    compiler = sys.modules.get("mjolnir.kernels.compiler")  # imported where there are kernels
    return float(compiler.CACHE_STATS["compile_seconds"]) if compiler else 0.0


def _batches(runner: DecodeRunner) -> Iterator[tuple[int, int]]:
    """(query length, sequences) of steps that between them launch every variant of a runner."""
    most = runner.config.max_num_seqs
    for q_len in range(1, runner.config.max_q_len + 1):
        yield q_len, min(4, most)
        shape = getattr(runner, "shapes", {}).get(q_len)  # of the CUDA kernels: larger batches merge in another way
        if shape is not None:
            small = shape.merge_here(min(4, most))
            other = (size for size in range(5, most + 1) if shape.merge_here(size) != small)
            yield from ((q_len, size) for size in itertools.islice(other, 1))


def random_pages(config: RunnerConfig, num_seqs: int, q_len: int, token_major: bool) -> Pages:
    """Sequences of `LENGTHS`, at least ``q_len`` long, in shuffled pages among unused ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = [LENGTHS[seq % len(LENGTHS)] for seq in range(num_seqs)]
    lengths = [max(length, q_len) if length else 0 for length in lengths]
    packed = config.kv_format == "e2m3"
    row = e2m3.row_bytes(config.head_size) if packed else config.head_size
    counts = [-(-length // config.page_size) for length in lengths]
    total = sum(counts) + 1
    codes = torch.randint(0, 256, (total, config.page_size, config.num_kv_heads, 2 * row), generator=generator)
    codes = codes.to(torch.uint8) & (0xFF if packed else 0xBF)  # e4m3 below 2: no NaN
    order = torch.randperm(total - 1, generator=generator) + 1  # page 0 is vLLM's null page
    table = torch.zeros((num_seqs, max(1, *counts)), dtype=torch.int32)
    if not packed:
        codes[0] = NAN_BYTE
    places = []
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        first = sum(counts[:seq])
        table[seq, :count] = order[first : first + count]
        token = torch.arange(length)
        places.append((table[seq, token // config.page_size].long(), token % config.page_size))
        if not packed and length % config.page_size:
            codes[int(table[seq, count - 1]), length % config.page_size :] = NAN_BYTE
    scales = _scales(config, packed, generator)
    halves = [_decoded(half, packed) for half in codes.split(row, dim=-1)]
    rows = [[half[place] * scale.double() for place in places] for half, scale in zip(halves, scales, strict=True)]
    cache = codes if token_major else codes.transpose(1, 2).contiguous()
    cache = cache.to(config.device)
    logical = cache.transpose(1, 2) if token_major else cache
    device_scales = [scale.to(config.device) for scale in scales]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=config.device)
    return Pages(split_kv(logical, "BHN2D", row), table.to(config.device), seq_lens, rows[0], rows[1], *device_scales)


def _scales(config: RunnerConfig, packed: bool, generator: torch.Generator) -> list[torch.Tensor]:
    """Descales of K and V: by channel of packed pages, else one number each."""
    if not packed:
        return [torch.tensor(0.75), torch.tensor(1.5)]
    shape = config.num_kv_heads, config.head_size
    return [0.1 + 0.3 * torch.rand(shape, generator=generator) for _ in range(2)]


def _decoded(codes: torch.Tensor, packed: bool) -> torch.Tensor:
    return e2m3.decode(e2m3.unpack(codes)).double() if packed else dequantised(codes)


def _row_error(runner: DecodeRunner, pages: Pages, q_len: int, causal: bool) -> float:
    """The largest relative error of an output row; NaN where one is NaN, infinite where padding is not zero."""
    config = runner.config
    num_seqs = len(pages.keys)
    generator = torch.Generator().manual_seed(q_len)
    query = torch.randn((num_seqs * q_len, config.num_heads, config.head_size), generator=generator)
    query = query.to(config.out_dtype)
    out = torch.full_like(query, torch.nan, device=config.device)
    plan = runner.plan(pages.seq_lens, pages.block_table, q_len=q_len, causal=causal)
    scale = config.head_size**-0.5
    runner.run(plan, query.to(config.device), out, pages.kv, pages.k_scale, pages.v_scale, scale)
    expected = torch.cat(
        [
            _attend(part.double(), keys, values, scale, causal)
            for part, keys, values in zip(query.split(q_len), pages.keys, pages.values, strict=True)
        ]
    )
    difference = (out.cpu().double() - expected).norm(dim=-1)
    return float((difference / expected.norm(dim=-1).clamp_min(1e-9)).max())


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Attention of the last tokens of one sequence, (tokens, heads, head_size) float64; zeros where it is empty."""
    length, kv_heads = keys.shape[:2]
    if not length:
        return torch.zeros_like(query)
    tokens, heads, size = query.shape
    grouped = query.view(tokens, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    if causal:
        hidden = torch.arange(length) > torch.arange(length - tokens, length)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), values).reshape(tokens, heads, size)
