"""Decode steps for tests: shapes, data and block tables, and what the oracle says.

The cache starts out as NaN bytes everywhere and only live rows are written, so every test also shows that
pages nobody refers to, and what stands past the end of a sequence in its last page, are never read.
"""

import dataclasses

import torch

from mjolnir.layouts import PagedKV, split_kv
from mjolnir.reference.attention import paged_attention
from mjolnir.reference.executor import TorchRunner
from mjolnir.runner import RunnerConfig

LAYOUTS = ["BHN2D", "BNH2D", "B2NHD", "B2HND", "2BNHD", "2BHND"]
NAN_BYTE = 0x7F
OUT_OF_RANGE = (2**31 - 1, -1)  # what a block table may hold past the end of a sequence
SENTINEL = 777.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: its shapes, and the seed of its data."""

    lengths: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    head_size: int = 64
    page_size: int = 16
    q_len: int = 1
    causal: bool = True
    q_dtype: str = "fp8"
    out_dtype: torch.dtype = torch.float32
    layout: str = "BHN2D"
    max_splits: int = 16
    num_sms: int = 20
    seed: int = 0

    def config(self) -> RunnerConfig:
        return RunnerConfig(
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            page_size=self.page_size,
            out_dtype=self.out_dtype,
            max_num_seqs=len(self.lengths),
            device=torch.device("cpu"),
            max_q_len=self.q_len,
            q_dtype=self.q_dtype,
            max_splits=self.max_splits,
        )


class Step:
    """A case's tensors: K and V codes as (pages, page_size, KV heads, head_size), block table, query."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        heads = case.kv_heads * case.group
        counts = [-(-length // case.page_size) for length in case.lengths]
        pages = sum(counts) + 2  # and two that nobody refers to
        shuffled = torch.randperm(pages, generator=generator).tolist()
        shape = (pages, case.page_size, case.kv_heads, case.head_size)
        self.k = torch.full(shape, NAN_BYTE, dtype=torch.uint8)
        self.v = torch.full(shape, NAN_BYTE, dtype=torch.uint8)
        width = max(1, max(counts) + case.seed % 3)  # some end right behind the longest sequence
        self.block_table = torch.tensor([OUT_OF_RANGE[page % 2] for page in range(width)], dtype=torch.int32)
        self.block_table = self.block_table.repeat(len(counts), 1)
        for seq, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
            blocks = [shuffled.pop() for _ in range(count)]
            self.block_table[seq, :count] = torch.tensor(blocks, dtype=torch.int32)
            for cache in (self.k, self.v):
                rows = torch.randn((length, case.kv_heads, case.head_size), generator=generator)
                codes = rows.to(torch.float8_e4m3fn).view(torch.uint8)
                for page, block in enumerate(blocks):
                    part = codes[page * case.page_size : (page + 1) * case.page_size]
                    cache[block, : len(part)] = part
        self.seq_lens = torch.tensor(case.lengths, dtype=torch.int32)
        query = torch.randn((len(counts) * case.q_len, heads, case.head_size), generator=generator)
        self.query = query.to(torch.bfloat16)

    def place(self, seq: int, token: int) -> tuple[int, int]:
        """Page and row of a token."""
        return int(self.block_table[seq, token // self.case.page_size]), token % self.case.page_size

    def cache(self, layout: str | None = None) -> PagedKV:
        return split_kv(in_layout(self.k, self.v, layout or self.case.layout), layout or self.case.layout, self.row)

    @property
    def row(self) -> int:
        return self.case.head_size

    def run(self, *, k_scale=1.0, v_scale=1.0, kv=None, query=None, plan=None, runner=None):
        """Output (float32 unless the case says else) and LSE as (tokens, heads)."""
        case = self.case
        runner = runner or TorchRunner(case.config(), num_sms=case.num_sms)
        plan = plan or runner.plan(self.seq_lens, self.block_table, q_len=case.q_len, causal=case.causal)
        out = torch.full(self.query.shape, SENTINEL, dtype=case.out_dtype)
        lse = torch.full((len(case.lengths), case.kv_heads, case.q_len * case.group), SENTINEL)
        scales = torch.as_tensor(k_scale, dtype=torch.float32), torch.as_tensor(v_scale, dtype=torch.float32)
        arguments = (plan, self.query if query is None else query)
        rest = (kv or self.cache(), *scales, case.head_size**-0.5)
        runner.run(*arguments, out, *rest, lse=lse)
        # Without an LSE the executor takes a shorter way where it can; it must give the same.
        again = torch.full_like(out, SENTINEL)
        runner.run(*arguments, again, *rest)
        torch.testing.assert_close(again.float(), out.float(), rtol=1e-2, atol=1e-5, equal_nan=True)
        tokens = lse.view(len(case.lengths), case.kv_heads, case.q_len, case.group).transpose(1, 2)
        return out, tokens.reshape(self.query.shape[:2])

    def oracle(self, query: torch.Tensor, *, k_scale=1.0, v_scale=1.0):
        case = self.case
        return paged_attention(
            query,
            self.k,
            self.v,
            self.block_table,
            self.seq_lens,
            [case.q_len] * len(case.lengths),
            softmax_scale=case.head_size**-0.5,
            k_scale=k_scale,
            v_scale=v_scale,
            causal=case.causal,
        )

    def computed_query(self) -> torch.Tensor:
        """The query that T5 computes with: e4m3 with one descale per sequence and KV head, or as it came."""
        case = self.case
        query = self.query.float()
        if case.q_dtype != "fp8":
            return query.double()
        rounded = torch.empty(query.shape, dtype=torch.float64)
        for seq in range(len(case.lengths)):
            for head in range(case.kv_heads):
                part = (
                    slice(seq * case.q_len, (seq + 1) * case.q_len),
                    slice(head * case.group, (head + 1) * case.group),
                )
                scale = query[part].abs().max().clamp_min(1e-6) / 448
                rounded[part] = (query[part] / scale).to(torch.float8_e4m3fn).double() * scale.double()
        return rounded

    def largest_value(self) -> float:
        values = self.v.view(torch.float8_e4m3fn).float()
        return float(values.nan_to_num(0.0).abs().max())


def in_layout(k: torch.Tensor, v: torch.Tensor, layout: str) -> torch.Tensor:
    """A contiguous cache of a layout, written without the code that reads it."""
    heads_first = layout in ("BHN2D", "B2HND", "2BHND")
    if heads_first:
        k, v = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    if layout.endswith("2D"):
        return torch.cat([k, v], dim=-1).contiguous()
    return torch.stack([k, v], dim=1 if layout.startswith("B2") else 0).contiguous()
