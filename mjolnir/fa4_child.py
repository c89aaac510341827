"""The probe's own process: FlashAttention 4 on small paged batches against fp32, then one line with the verdict.

``python -m mjolnir.fa4_child HEAD_SIZE PAGE...``; mjolnir/fa4_probe.py starts it. What goes wrong on the device here
(an illegal instruction, a hang) ends with this process.

The batches have three requests, two KV heads with four query heads each, pages in no order, and descales that
differ by head. They are chosen so that the kernels an engine asks for are all compiled: prompts longer than a tile
beside a decode, decodes long enough to be split over SMs, decodes too short for that, and a windowed step with sinks.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mjolnir.fa4_probe import MARK, TILE_PAGE, WITHOUT_DESCALES

LIMIT = 5e-2  # of the relative error of a request's output; P in e4m3 alone costs some 0.026
KV_HEADS, GROUP = 2, 4
WINDOW = 100

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One step: its tokens, the cache's format and page size, and whether it has a window and sinks."""

    name: str
    fp8: bool
    page: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    windowed: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {'fp8' if self.fp8 else 'bf16'}, page {self.page}"


def cases(head_size: int, pages: Sequence[int]) -> list[Case]:
    """The steps to run. The kernel for head size 256 has no descales, no window with sinks, and pages of 128 only."""
    alone = head_size == WITHOUT_DESCALES
    formats = (False,) if alone else (True, False)
    found = []
    for page in (TILE_PAGE,) if alone else pages:
        for fp8 in formats:
            found.append(Case("prompts and a decode", fp8, page, (1, 200, 37), (700, 333, 37)))
            found.append(Case("long decodes", fp8, page, (1, 1, 1), (700, 333, 37)))
            if page == TILE_PAGE:
                found.append(Case("short decodes", fp8, page, (1, 1, 1), (300, 33, 1)))
            if page == TILE_PAGE and not alone:
                found.append(Case("window and sinks", fp8, page, (1, 200, 37), (700, 333, 37), windowed=True))
    return found


@dataclass(frozen=True)
class Inputs:
    """A step's tensors as vLLM passes them.

    Attributes:
        query: (tokens, KV_HEADS * GROUP, head_size), e4m3 or bf16.
        cache: (pages, KV_HEADS, page, 2 * head_size) of the same dtype; K and V of a token side by side.
        descales: (3, requests, KV_HEADS) float32 of Q, K and V; None for bf16.
        block_table: (requests, pages of the longest) int32.
        sinks: (KV_HEADS * GROUP,) bf16, or None.
    """

    query: torch.Tensor
    cache: torch.Tensor
    descales: torch.Tensor | None
    block_table: torch.Tensor
    sinks: torch.Tensor | None


def build(case: Case, head_size: int, device: str) -> Inputs:
    """Random inputs of a step, the same ones each time."""
    generator = torch.Generator().manual_seed(head_size)
    width = -(-max(case.seq_lens) // case.page)
    requests, total = len(case.seq_lens), len(case.seq_lens) * width

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query = normal(sum(case.query_lens), KV_HEADS * GROUP, head_size)
    cache = normal(total, KV_HEADS, case.page, 2 * head_size)
    descales = None
    if case.fp8:
        by_head = torch.tensor(
            [[0.75, 0.5], [0.625, 1.5], [1.25, 0.375]]
        )  # of Q, K, V; powers of two would hide little
        descales = by_head[:, None].expand(3, requests, KV_HEADS).contiguous().to(device)
        query = query / by_head[0].repeat_interleave(GROUP)[:, None]
        scale = by_head[1:].T.repeat_interleave(head_size, dim=1)  # (KV_HEADS, 2 * head_size)
        cache = cache / scale[None, :, None]
    dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    return Inputs(
        query.to(dtype).to(device),
        cache.to(dtype).to(device),
        descales,
        torch.randperm(total, generator=generator).to(torch.int32).view(requests, width).to(device),
        normal(KV_HEADS * GROUP).to(torch.bfloat16).to(device) if case.windowed else None,
    )


def call(case: Case, head_size: int, inputs: Inputs, attend: Attend) -> torch.Tensor:
    """Run one step as vLLM's FLASH_ATTN does; returns (tokens, heads, head_size) bf16."""
    device = inputs.query.device
    starts = torch.tensor([0, *case.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    key, value = inputs.cache.transpose(1, 2).split(head_size, dim=-1)
    out = torch.full_like(inputs.query, float("nan"), dtype=torch.bfloat16)
    q_descale, k_descale, v_descale = inputs.descales if inputs.descales is not None else (None, None, None)
    attend(
        q=inputs.query,
        k=key,
        v=value,
        out=out,
        cu_seqlens_q=starts.to(device),
        max_seqlen_q=max(case.query_lens),
        seqused_k=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        max_seqlen_k=inputs.block_table.shape[1] * case.page,
        softmax_scale=head_size**-0.5,
        causal=True,
        window_size=[WINDOW - 1, 0] if case.windowed else None,
        block_table=inputs.block_table,
        s_aux=inputs.sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=1 if head_size == WITHOUT_DESCALES else 0,
        fa_version=4,
    )
    return out


def expected(case: Case, head_size: int, inputs: Inputs) -> torch.Tensor:
    """The same step in fp32 on the CPU, one request after the other; returns (tokens, heads, head_size)."""
    scales = torch.ones(3, len(case.seq_lens), KV_HEADS) if inputs.descales is None else inputs.descales.cpu()
    query, cache, table = inputs.query.cpu().float(), inputs.cache.cpu().float(), inputs.block_table.cpu().long()
    results, start = [], 0
    for request, (q_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        rows = cache[table[request]].transpose(0, 1).flatten(1, 2)[:, :seq_len]
        key, value = (rows.split(head_size, dim=-1)[i] * scales[i + 1, request][:, None, None] for i in range(2))
        key, value = key.repeat_interleave(GROUP, dim=0), value.repeat_interleave(GROUP, dim=0)
        q = query[start : start + q_len].transpose(0, 1) * scales[0, request].repeat_interleave(GROUP)[:, None, None]
        position, token = torch.arange(seq_len), torch.arange(seq_len - q_len, seq_len)[:, None]
        seen = (position <= token) & (position > token - (WINDOW if case.windowed else seq_len + 1))
        scores = (q @ key.transpose(1, 2) * head_size**-0.5).masked_fill(~seen, float("-inf"))
        if inputs.sinks is not None:
            sink = inputs.sinks.cpu().float()[:, None, None].expand(-1, q_len, 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        results.append((weights @ value).transpose(0, 1))
        start += q_len
    return torch.cat(results)


def worst_error(case: Case, found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest relative error (of Euclidean norms) of a request's output; NaN where the output holds one."""
    pairs = zip(found.cpu().float().split(case.query_lens), wanted.split(case.query_lens), strict=True)
    errors = torch.stack([(one - other).norm() / other.norm() for one, other in pairs])
    return float(errors.max())  # of a NaN and a number it is the NaN


def check(head_size: int, pages: Sequence[int], attend: Attend, device: str) -> tuple[bool, str]:
    """Run all steps; whether all came out right, and one line about it."""
    worst, steps = 0.0, cases(head_size, pages)
    for case in steps:
        inputs = build(case, head_size, device)
        try:
            error = worst_error(case, call(case, head_size, inputs, attend), expected(case, head_size, inputs))
        except (ImportError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            lines = str(failure).strip().splitlines() or [""]
            return False, f"{case}: {type(failure).__name__}: {lines[0][:200]}"
        if not error < LIMIT:  # a NaN is not
            return False, f"{case}: relative error {error:.3g}, accepted below {LIMIT:g}"
        worst = max(worst, error)
    return True, f"{len(steps)} steps, largest relative error {worst:.4f}"


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """The verdict; ``lasting`` is false where the next start may well see another one."""
    try:
        if not torch.cuda.is_available():
            return {"passed": False, "detail": "no CUDA device", "lasting": False}
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func  # noqa: PLC0415

        head_size, *pages = map(int, arguments)
        passed, detail = check(head_size, pages, flash_attn_varlen_func, "cuda")
        return {"passed": passed, "detail": detail, "lasting": True}
    except (ImportError, torch.OutOfMemoryError) as error:
        return {"passed": False, "detail": f"{type(error).__name__}: {error}"[:300], "lasting": False}


if __name__ == "__main__":
    sys.stdout.write(MARK + json.dumps(main(sys.argv[1:])) + "\n")
