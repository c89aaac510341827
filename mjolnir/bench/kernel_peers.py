"""Existing decode-attention kernels over an fp8 paged cache, as their engines call them.

A builder does on the host what its engine does once a step or earlier, and returns what runs in a layer. A kernel that
takes an fp8 query gets it as fp8; for the others the bf16 query holds the same values.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mjolnir.bench.kernel_decode import Workload

FP8 = torch.float8_e4m3fn
# vllm/config: sizes that graphs are captured for; the Triton backend rounds its threshold to one of them.
CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
TRITON_SEGMENTS = 16
FA3_SPLITS = 32  # vLLM's bound under CUDA graphs
WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class Launch:
    """A kernel ready to run on a workload.

    Attributes:
        run: launches on a buffer, given by its number.
        out: what it writes, (tokens, num_heads, head_size).
        factor: what ``out`` is to be multiplied by, for kernels that leave the descale of V to their caller.
    """

    run: Callable[[int], None]
    out: torch.Tensor
    factor: float = 1.0


Builder = Callable[["Workload"], Launch]


def triton_attn(work: "Workload") -> Launch:
    """Triton unified attention of vLLM (TRITON_ATTN), with an fp8 query."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import KVQuantMode  # noqa: PLC0415

    shape = work.cell.shape
    # As TritonAttentionMetadataBuilder: sequences up to which it splits them.
    threshold = min(CAPTURE_SIZES, key=lambda size: abs(size - 128 // shape.num_kv_heads))
    segments = (threshold, shape.num_heads, TRITON_SEGMENTS)
    outputs = torch.empty(*segments, shape.head_size, device=work.device)  # head sizes are powers of two
    maxima, sums = torch.empty(segments, device=work.device), torch.empty(segments, device=work.device)
    k, v = _fp8_cache(work)
    q_scale, k_scale, v_scale = _descales(work)

    def run(buffer: int) -> None:
        unified_attention(
            q=work.query8,
            k=k,
            v=v,
            out=work.out,
            cu_seqlens_q=work.query_start_loc,
            max_seqlen_q=work.cell.q_len,
            seqused_k=work.seq_lens,
            max_seqlen_k=work.longest,
            softmax_scale=work.softmax_scale,
            causal=True,
            alibi_slopes=None,
            use_alibi_sqrt=False,
            window_size=(-1, -1),
            block_table=work.tables[buffer],
            softcap=0,
            q_descale=q_scale[0, 0],
            k_descale=k_scale,
            v_descale=v_scale,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=TRITON_SEGMENTS,
            softmax_segm_output=outputs,
            softmax_segm_max=maxima,
            softmax_segm_expsum=sums,
            sinks=None,
            output_scale=None,
            mm_prefix_range=None,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
            k_scale_cache=None,
            v_scale_cache=None,
            chunk_lookback=-1,
            use_td=False,
        )

    return Launch(run, work.out)


def flash_attn_3(work: "Workload", splits: int = FA3_SPLITS) -> Launch:
    """FlashAttention 3 as vLLM's FLASH_ATTN calls it, fp8 throughout; 0 splits leave the number to its heuristic."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata  # noqa: PLC0415

    cell, shape = work.cell, work.cell.shape
    k, v = _fp8_cache(work)
    q_scale, k_scale, v_scale = _descales(work)
    schedule = get_scheduler_metadata(
        batch_size=len(cell.batch.lengths),
        max_seqlen_q=cell.q_len,
        max_seqlen_k=work.longest,
        num_heads_q=shape.num_heads,
        num_heads_kv=shape.num_kv_heads,
        headdim=shape.head_size,
        cache_seqlens=work.seq_lens,
        qkv_dtype=FP8,
        cu_seqlens_q=work.query_start_loc,
        page_size=cell.page_size,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )

    def run(buffer: int) -> None:
        flash_attn_varlen_func(
            q=work.query8,
            k=k,
            v=v,
            out=work.out,
            cu_seqlens_q=work.query_start_loc,
            max_seqlen_q=cell.q_len,
            seqused_k=work.seq_lens,
            max_seqlen_k=work.longest,
            softmax_scale=work.softmax_scale,
            causal=True,
            alibi_slopes=None,
            window_size=[-1, -1],
            block_table=work.tables[buffer],
            softcap=0,
            scheduler_metadata=schedule,
            fa_version=3,
            q_descale=q_scale,
            k_descale=k_scale,
            v_descale=v_scale,
            num_splits=splits,
            s_aux=None,
        )

    return Launch(run, work.out)


def flashinfer_decode(work: "Workload") -> Launch:
    """FlashInfer's paged decode on tensor cores, with a bf16 query."""
    from flashinfer import (  # type: ignore[import-not-found]  # noqa: PLC0415
        BatchDecodeWithPagedKVCacheWrapper,
    )

    cell, shape = work.cell, work.cell.shape
    counts = torch.tensor([-(-length // cell.page_size) for length in cell.batch.lengths])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    last = torch.tensor([(length - 1) % cell.page_size + 1 for length in cell.batch.lengths], dtype=torch.int32)
    wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
        _workspace("flashinfer", work.device),
        cell.layout,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=starts.to(work.device),
        paged_kv_indices_buffer=torch.empty_like(work.pages[0]),
        paged_kv_last_page_len_buffer=last.to(work.device),
        use_tensor_cores=True,
        backend="auto",
    )
    wrapper.plan(
        starts,
        work.pages[0],
        last,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        cell.page_size,
        pos_encoding_mode="NONE",
        q_data_type=torch.bfloat16,
        kv_data_type=FP8,
        o_data_type=torch.bfloat16,
        sm_scale=work.softmax_scale,
        q_len_per_req=cell.q_len,
    )
    cache = _stored_cache(work)

    def run(buffer: int) -> None:
        wrapper._paged_kv_indices_buf = work.pages[buffer]  # what plan() would copy there, without the copy
        # v_scale is left to the factor: run() would launch a kernel of its own for it.
        wrapper.run(work.query, cache, k_scale=work.k_descale, out=work.out, enable_pdl=None)

    return Launch(run, work.out, factor=work.v_descale)


def xqa(work: "Workload") -> Launch:
    """XQA, FlashInfer's decode kernel for Hopper, with a bf16 query."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache  # type: ignore[import-not-found]  # noqa: PLC0415

    cell, shape = work.cell, work.cell.shape
    batch = len(cell.batch.lengths)
    out, mask = work.out, None
    if cell.q_len > 1:
        out = work.out.view(batch, cell.q_len, shape.num_heads, shape.head_size)
        # As vLLM: 32 bits a query token, in halves, one bit a draft token that it sees.
        bits = torch.tensor([(2 << token) - 1 for token in range(cell.q_len)], dtype=torch.int32, device=work.device)
        mask = bits.view(torch.uint16).view(1, cell.q_len, 2).expand(batch, -1, -1).contiguous()
    cache = _stored_cache(work)

    def run(buffer: int) -> None:
        xqa_batch_decode_with_kv_cache(
            query=work.query,
            kv_cache=cache,
            workspace_buffer=_workspace("xqa", work.device),
            block_tables=work.tables[buffer],
            seq_lens=work.seq_lens,
            max_seq_len=work.longest,
            bmm1_scale=work.softmax_scale * work.k_descale,
            bmm2_scale=work.v_descale,
            window_left=-1,
            out=out,
            sinks=None,
            kv_layout=cell.layout,
            q_len_per_req=cell.q_len,
            mask=mask,
            enable_pdl=None,
        )

    return Launch(run, work.out)


BUILDERS: dict[str, tuple[Builder, str]] = {
    "TRITON_ATTN": (triton_attn, "vllm.v1.attention.ops.triton_unified_attention"),
    "FA3": (flash_attn_3, "vllm.vllm_flash_attn"),
    "FA3, own splits": (functools.partial(flash_attn_3, splits=0), "vllm.vllm_flash_attn"),
    "FlashInfer": (flashinfer_decode, "flashinfer"),
    "XQA": (xqa, "flashinfer.decode"),
}


def importable() -> tuple[dict[str, Builder], dict[str, str]]:
    """The kernels that are installed here, by name; and of the others, why not."""
    found, missing = {}, {}
    for name, (builder, module) in BUILDERS.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # a compiled part may fail to load in any way
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            found[name] = builder
    return found, missing


def peer_versions() -> dict[str, str]:
    """Versions of the peers' packages that have been imported, where a package tells its own."""
    packages = {name: sys.modules.get(name) for name in ("vllm", "flashinfer")}
    found = {name: getattr(package, "__version__", None) for name, package in packages.items()}
    return {name: str(version) for name, version in found.items() if version is not None}


def _fp8_cache(work: "Workload") -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as (pages, page_size, num_kv_heads, head_size) e4m3 views."""
    k: torch.Tensor = work.kv.k
    v: torch.Tensor = work.kv.v
    return k.view(FP8), v.view(FP8)


def _stored_cache(work: "Workload") -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as e4m3 views in the order of dimensions that they are stored in."""
    k, v = _fp8_cache(work)
    return (k, v) if work.cell.layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def _descales(work: "Workload") -> list[torch.Tensor]:
    """Descales of Q, K and V, each (num_seqs, num_kv_heads) float32 of one element expanded."""
    shape = (len(work.cell.batch.lengths), work.cell.shape.num_kv_heads)
    values = (work.q_descale, work.k_descale, work.v_descale)
    return [torch.tensor(value, device=work.device).expand(shape) for value in values]


@functools.cache
def _workspace(name: str, device: torch.device) -> torch.Tensor:
    """A workspace that one kind of kernel keeps; zero at first, since XQA counts arrivals in it."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
