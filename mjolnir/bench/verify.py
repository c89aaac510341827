"""Is T5 right on this machine? One decode step of every kind, against attention computed in float64.

The cases are few and cover much: every pair of values of any two dimensions occurs in one of them. The cache starts out
as NaN bytes everywhere and only live rows are written, so a kernel that reads a page nobody refers to, or what stands
past the end of a sequence, gives NaN.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mjolnir.bench.verify_cases import DTYPES, Case, covering
from mjolnir.errors import ConfigurationError
from mjolnir.layouts import PagedKV, split_kv
from mjolnir.runner import DecodeRunner, RunnerConfig, create_runner

NAN_BYTE = 0x7F
OUT_OF_RANGE = (2**31 - 1, -1)  # what a block table may hold past the end of a sequence
SENTINEL = 777.0
LEAST_CAPABILITY = (8, 9)  # the first with e4m3 conversions

# Of a row's norm. Rounding the output to bf16 is at most 2^-8 of it; f16 query, weights and partial results add 2e-3.
LARGEST_ERROR = 1e-2
LARGEST_LSE_ERROR = 4e-3  # nats; 1.6e-3 seen where Hopper sums e4m3 products, 1.4e-6 elsewhere

Factory = Callable[[RunnerConfig], DecodeRunner]


@dataclass(frozen=True)
class Outcome:
    """What a case gave.

    Attributes:
        case: the case.
        error: largest ‖out - expected‖ / ‖expected‖ of a query row, with and without an LSE asked for.
        lse_error: largest absolute error of the natural-log LSE.
        fault: what is wrong beside the figures; empty where nothing is.
    """

    case: Case
    error: float
    lse_error: float
    fault: str = ""

    @property
    def right(self) -> bool:
        """Whether all is within bounds; NaN is not."""
        return not self.fault and self.error <= LARGEST_ERROR and self.lse_error <= LARGEST_LSE_ERROR

    def row(self) -> dict[str, Any]:
        """The outcome as JSON."""
        figures = {"relative_error": _figure(self.error), "lse_error": _figure(self.lse_error)}
        lengths = {"lengths": list(self.case.lengths)}
        return {**asdict(self.case), **lengths, **figures, "fault": self.fault, "right": self.right}


class Step:
    """A case's tensors on a device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self._generator = torch.Generator().manual_seed(case.seed)
        counts = [-(-length // case.page_size) for length in case.lengths]
        self.seq_lens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self._blocks = torch.randperm(sum(counts) + 2, generator=self._generator).to(device)  # two are nobody's
        self.block_table = self._block_table(counts)
        self.kv = self._cache(len(self._blocks))
        rows = len(counts) * case.q_len
        self.query = self._normal(rows, case.num_kv_heads * case.group, case.head_size).to(DTYPES[case.dtype])
        self.k_scale, self.v_scale = self._descale(), self._descale()

    def attend(self, runner: DecodeRunner, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, with one row behind it that must stay `SENTINEL`, and LSE as (tokens, heads)."""
        case = self.case
        shape = (len(case.lengths), case.num_kv_heads, case.q_len * case.group)
        lse = torch.full(shape, SENTINEL, dtype=torch.float32, device=self.device)
        out = self.query.new_full((self.query.shape[0] + 1, *self.query.shape[1:]), SENTINEL)
        plan = runner.plan(self.seq_lens, self.block_table, q_len=case.q_len, causal=case.causal)
        scales = (self.k_scale, self.v_scale, case.head_size**-0.5)
        runner.run(plan, self.query, out, self.kv, *scales, lse=lse if with_lse else None)
        tokens = lse.unflatten(2, (case.q_len, case.group)).transpose(1, 2)
        return out, tokens.reshape(self.query.shape[:2])

    def expected(self, q_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE in float64; ``q_dtype`` is how the runner takes the query."""
        case = self.case
        outs, lses = [], []
        for seq, length in enumerate(case.lengths):
            query = self.query[seq * case.q_len : (seq + 1) * case.q_len].double()
            if q_dtype == "fp8":
                query = _through_e4m3(query, case.num_kv_heads)
            token = torch.arange(length, device=self.device)
            page, row = self.block_table[seq, token // case.page_size].long(), token % case.page_size
            keys = _e4m3(self.kv.k[page, row]) * self._per_head(self.k_scale, seq)
            values = _e4m3(self.kv.v[page, row]) * self._per_head(self.v_scale, seq)
            out, lse = attention(query, keys, values, case.head_size**-0.5, causal=case.causal)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device)

    def _block_table(self, counts: list[int]) -> torch.Tensor:
        width = max(counts) + self.case.seed % 3  # some end right behind the longest sequence
        filler = torch.tensor(OUT_OF_RANGE, dtype=torch.int32, device=self.device)
        table = filler.repeat(len(counts), -(-width // 2))[:, :width].contiguous()
        used = iter(self._blocks.split([*counts, 2]))
        for seq, count in enumerate(counts):
            table[seq, :count] = next(used)
        return table

    def _cache(self, pages: int) -> PagedKV:
        case = self.case
        shape = cache_shape(case.layout, pages, case.num_kv_heads, case.page_size, case.head_size)
        kv = split_kv(torch.full(shape, NAN_BYTE, dtype=torch.uint8, device=self.device), case.layout, case.head_size)
        for seq, length in enumerate(case.lengths):
            token = torch.arange(length, device=self.device)
            page, row = self.block_table[seq, token // case.page_size].long(), token % case.page_size
            cache: torch.Tensor
            for cache in (kv.k, kv.v):
                codes = self._normal(length, case.num_kv_heads, case.head_size).to(torch.float8_e4m3fn)
                cache[page, row] = codes.view(torch.uint8)
        return kv

    def _descale(self) -> torch.Tensor:
        heads = self.case.num_kv_heads
        shape = {"tensor": (1,), "head": (heads,), "sequence": (len(self.case.lengths), heads)}[self.case.descale]
        return (torch.rand(shape, generator=self._generator) + 0.5).to(self.device)

    def _per_head(self, scale: torch.Tensor, seq: int) -> torch.Tensor:
        """(num_kv_heads or 1, 1) float64: the descale of one sequence."""
        return (scale[seq] if scale.dim() == 2 else scale).double()[:, None]


def cache_shape(layout: str, pages: int, num_kv_heads: int, page_size: int, row: int) -> tuple[int, ...]:
    """Shape of a cache tensor in a logical layout; see `mjolnir.layouts`."""
    sizes = {"B": pages, "H": num_kv_heads, "N": page_size, "D": row, "2": 2}
    if layout.endswith("2D"):
        return (*(sizes[letter] for letter in layout[:-2]), 2 * row)
    return tuple(sizes[letter] for letter in layout)


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence's last tokens over all its keys, whole, in the dtype of its arguments.

    `mjolnir.reference.attention`, the oracle, says the same one head and token at a time.

    Args:
        query: (q_len, num_heads, head_size).
        keys: (length, num_kv_heads, head_size); a causal step has ``length >= q_len``, or 0.
        values: as ``keys``.
        softmax_scale: factor of the scores.
        causal: whether a query token sees only keys up to its own position.

    Returns:
        The output, shape of ``query``; and the natural-log LSE, (q_len, num_heads).
    """
    q_len, length = query.shape[0], keys.shape[0]
    grouped = query.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,nhd->hgqn", grouped, keys) * softmax_scale
    if causal and length:
        last = torch.arange(length - q_len, length, device=query.device)
        scores.masked_fill_(torch.arange(length, device=query.device) > last[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("hgqn,nhd->qhgd", torch.exp(scores - lse[..., None]), values)
    return out.flatten(1, 2), lse.flatten(0, 1).T


def t5_runner(config: RunnerConfig) -> DecodeRunner:
    """T5's runner for a configuration's device.

    Raises:
        ConfigurationError: there is none for it.
    """
    if config.device.type != "cuda":
        return create_runner(config)
    from mjolnir.kernels.stream_runner import StreamRunner  # noqa: PLC0415  (imports Triton)

    return StreamRunner(config, ahead=False)  # a few steps each: compile what they need


def usable_device(name: str) -> torch.device:
    """The device to work on.

    Raises:
        ConfigurationError: there is none of that kind here, or it is too old.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigurationError(f"device {name!r}: accepted: cuda, cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError(f"device 'cuda': PyTorch {torch.__version__} finds none; accepted: an NVIDIA GPU")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        found = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
        raise ConfigurationError(f"device 'cuda': {found}; accepted: {'.'.join(map(str, LEAST_CAPABILITY))} or newer")
    return torch.device("cuda")


def device_name(device: torch.device) -> str:
    """The device in words."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


def check(case: Case, factory: Factory, device: torch.device) -> Outcome:
    """Run one case; a runner that raises is wrong, whatever it raises."""
    try:
        step = Step(case, device)
        runner = factory(case.config(device))
        expected, expected_lse = step.expected(runner.config.q_dtype)
        out, _ = step.attend(runner, with_lse=False)
        again, lse = step.attend(runner, with_lse=True)
        error = _row_error(torch.stack([out[:-1], again[:-1]]).double(), expected)
        untouched = all(bool((result[-1] == SENTINEL).all()) for result in (out, again))
        fault = "" if untouched else "wrote behind its rows"
        return Outcome(case, error, _lse_error(lse.double(), expected_lse), fault)
    except Exception as raised:
        text = (str(raised).strip() or "no message").splitlines()[0]
        return Outcome(case, torch.nan, torch.nan, f"{type(raised).__name__}: {text}")


def verify(
    device: torch.device, factory: Factory = t5_runner, cases: Sequence[Case] | None = None
) -> Iterator[Outcome]:
    """Outcomes of the cases, one after the other."""
    for case in covering() if cases is None else cases:
        yield check(case, factory, device)


def main(kind: str, *, as_json: bool) -> bool:
    """Verify a device and print what came out.

    Args:
        kind: ``cuda`` or ``cpu``.
        as_json: print JSON instead of a table.

    Returns:
        Whether all cases are right.

    Raises:
        ConfigurationError: there is no such device here.
    """
    device = usable_device(kind)
    if device.type == "cuda":
        _compile_ahead(device)
    outcomes = list(verify(device, t5_runner))
    if as_json:
        sys.stdout.write(json.dumps(report(outcomes, device), indent=1) + "\n")
    else:
        wide_console().print(table(outcomes))
        sys.stdout.write(summary(outcomes, device) + "\n")
    return all(outcome.right for outcome in outcomes)


def _compile_ahead(device: torch.device) -> None:
    """Compile what the cases need, on all cores at once: one after the other takes minutes."""
    from mjolnir.kernels.stream_runner import StreamRunner, compile_for_device, variants_of  # noqa: PLC0415  (Triton)

    variants = []
    for case in covering():
        step = Step(case, device)

        def attend(runner: StreamRunner, step: Step = step) -> None:
            step.attend(runner, with_lse=False)
            step.attend(runner, with_lse=True)

        variants += variants_of(case.config(device), attend)
    compile_for_device(variants)


def wide_console() -> Console:
    """Standard output; wide enough for a table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def table(outcomes: Sequence[Outcome]) -> Table:
    """The outcomes for a terminal."""
    names = [field.name for field in fields(Case) if field.name != "seed"]
    rendered = Table(*(name.replace("_", " ") for name in names), "error", "LSE error", "", box=None)
    for outcome in outcomes:
        verdict = "right" if outcome.right else f"[red]WRONG[/] {outcome.fault}"
        values = [str(getattr(outcome.case, name)) for name in names]
        rendered.add_row(*values, f"{outcome.error:.1e}", f"{outcome.lse_error:.1e}", verdict)
    return rendered


def summary(outcomes: Sequence[Outcome], device: torch.device) -> str:
    """One line, and one more for each case that is wrong."""
    right = [outcome for outcome in outcomes if outcome.right]
    error = max((outcome.error for outcome in right), default=torch.nan)
    lse_error = max((outcome.lse_error for outcome in right), default=torch.nan)
    lines = [
        f"{len(right)} of {len(outcomes)} cases right on {device_name(device)}; largest relative error {error:.1e} "
        f"(accepted: {LARGEST_ERROR:.0e}), of the LSE {lse_error:.1e} ({LARGEST_LSE_ERROR:.0e})"
    ]
    for outcome in outcomes:
        if not outcome.right:
            figures = f"relative error {outcome.error:.1e}, LSE error {outcome.lse_error:.1e}"
            lines.append(f"wrong: {outcome.case}: {outcome.fault or figures}")
    return "\n".join(lines)


def report(outcomes: Sequence[Outcome], device: torch.device) -> dict[str, Any]:
    """The outcomes as JSON; figures that are NaN are null."""
    return {
        "device": device_name(device),
        "right": all(outcome.right for outcome in outcomes),
        "accepted": {"relative_error": LARGEST_ERROR, "lse_error": LARGEST_LSE_ERROR},
        "cases": [outcome.row() for outcome in outcomes],
    }


def _e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float().double()


def _through_e4m3(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """A sequence's query (q_len, num_heads, head_size) as T5 quantises it, with one descale a KV head."""
    grouped = query.unflatten(1, (num_kv_heads, -1)).float()
    scale = grouped.abs().amax(dim=(0, 2, 3), keepdim=True).clamp_min(1e-6) / 448
    return ((grouped / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1, 2).double()


def _row_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a row over its norm, NaN if any is; a row that sees no key must be zero."""
    norm = expected.norm(dim=-1)
    return float(((out - expected).norm(dim=-1) / torch.where(norm > 0, norm, 1.0)).max())


def _lse_error(lse: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute error; what is minus infinity must be, and nothing else."""
    dead: torch.Tensor = expected == -torch.inf
    if not torch.equal(lse == -torch.inf, dead):
        return math.inf
    errors = torch.where(dead, 0.0, lse - expected).abs()
    return float(errors.max())


def _figure(value: float) -> float | None:
    return round(value, 7) if math.isfinite(value) else None
