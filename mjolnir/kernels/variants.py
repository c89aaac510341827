"""The variants of T5's CUDA kernels: everything that their machine code depends on, from a runner's configuration.

A variant is fixed by the configuration, the query length, the mask, who merges, and the strides of the tensors. Batch
size, lengths, pages, descales and addresses are run-time arguments, so one variant serves all batches and layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from mjolnir.kernels import fragments
from mjolnir.kernels.compiler import KernelVariant
from mjolnir.kernels.shares import merge_kernel
from mjolnir.kernels.stream import stream_kernel
from mjolnir.kernels.tuning import StreamTuning, stream_tuning
from mjolnir.kernels.wgmma import wgmma_kernel
from mjolnir.kernels.wide import wide_kernel
from mjolnir.runner import RunnerConfig

# Up to as many pieces of a pair, the last program merges them; a launch of its own costs more than it saves. H200,
# 2026-12-02: at 2 pieces a pair (64x2048) 73 us against 83 us, at 99 (1x4096) 18 us against 13 us.
MERGE_HERE_PIECES = 8
MERGE_WARPS = 4
FEWEST_MERGED, MOST_MERGED = 16, 128  # pieces that the merge kernel reads at once
WIDE_WARPS, WIDE_TOKENS, WIDE_TILE = 4, 16, 64  # what the wide kernel is written for

TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Strides(NamedTuple):
    """Strides of a step's tensors: of query and output in elements, of the cache in 4-byte words."""

    q_token: int
    q_head: int
    out_token: int
    out_head: int
    page: int
    head: int
    token: int


class Choice(NamedTuple):
    """What tells the variants of one runner apart."""

    q_len: int
    causal: bool
    merge_here: bool
    write_lse: bool
    channel_scales: bool
    q_dtype: torch.dtype
    strides: Strides


@dataclass(frozen=True)
class Shape:
    """What a query length fixes.

    Attributes:
        config: of the runner.
        q_len: query tokens of a request.
        tuning: how the decode kernel is built.
        num_sms: of the device.
    """

    config: RunnerConfig
    q_len: int
    tuning: StreamTuning
    num_sms: int

    @property
    def query_rows(self) -> int:
        """Query rows of a KV head."""
        return self.q_len * self.config.heads_per_kv_head

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return self.tuning.row_groups * self.tuning.rows

    @property
    def q_tiles(self) -> int:
        """Programs' worth of query rows of a KV head."""
        return -(-self.query_rows // self.rows)

    @property
    def programs(self) -> int:
        """Programs of a launch."""
        return self.num_sms * self.tuning.programs_per_sm

    @property
    def tile(self) -> int:
        """KV tokens of a tile."""
        tuning = self.tuning
        if tuning.kernel == "wide":
            return WIDE_TILE
        return tuning.tokens if tuning.kernel == "wgmma" else tuning.warps // tuning.row_groups * tuning.tokens

    def merge_here(self, num_seqs: int) -> bool:
        """Whether the decode kernel merges pieces itself, by the size of the batch."""
        if self.tuning.merge_here is not None:
            return self.tuning.merge_here
        return self.programs <= MERGE_HERE_PIECES * num_seqs * self.config.num_kv_heads * self.q_tiles

    @property
    def merged_at_once(self) -> int:
        """Pieces that the merge kernel reads at once: where it can, all pieces of the pairs of a single sequence."""
        pieces = self.programs // (self.config.num_kv_heads * self.q_tiles)
        return min(MOST_MERGED, max(FEWEST_MERGED, int(triton.next_power_of_2(pieces))))


def shape_of(
    config: RunnerConfig, q_len: int, num_sms: int, arch: str = "default", tuning: StreamTuning | None = None
) -> Shape:
    """The shape of a query length, tuned for an architecture; ``tuning`` overrides that."""
    rows = q_len * config.heads_per_kv_head
    return Shape(config, q_len, tuning or stream_tuning(arch, config.head_size, rows, config.kv_format), num_sms)


def siblings(choice: Choice, shapes: dict[int, Shape]) -> Iterator[Choice]:
    """Every choice that a runner can meet with the same tensors: all query lengths, masks and ways to merge."""
    for q_len, shape in shapes.items():
        ways = {shape.merge_here(num_seqs) for num_seqs in (1, shape.config.max_num_seqs)}
        for causal in {True, q_len == 1}:
            for merge_here in ways:
                yield choice._replace(q_len=q_len, causal=causal, merge_here=merge_here)


def decode_variant(shape: Shape, choice: Choice) -> KernelVariant:
    """The decode kernel's variant."""
    tuning = shape.tuning
    kernel, own = {
        "stream": (stream_kernel, _stream),
        "wide": (wide_kernel, _wide),
        "wgmma": (wgmma_kernel, _wgmma),
    }[tuning.kernel]
    constants = _constants(shape, choice) | own(shape, choice)
    cache = "*fp8e4nv" if tuning.kernel == "wgmma" else "*i32"
    out = TRITON_TYPES[shape.config.out_dtype]
    arguments = {
        "Q": f"*{TRITON_TYPES[choice.q_dtype]}",
        "K": cache,
        "V": cache,
        "OUT": f"*{out}",
        "BLOCK_TABLE": "*i32",
        "SEQ_LENS": "*i32",
        "PART_O": "*fp16",
        "PART_ML": "*fp32",
        "ARRIVED": "*i32",
        "LSE": "*fp32",
        "K_SCALE": "*fp32",
        "V_SCALE": "*fp32",
        "num_seqs": "i32",
        "num_pages": "i32",
        "softmax_scale": "fp32",
        "table_stride": "i32",
        "scale_seq_stride": "i32",
        "scale_head_stride": "i32",
    }
    return KernelVariant(
        kernel,
        tuple(arguments.items()),
        tuple(constants.items()),
        label=_label(shape, choice) + (", merging" if choice.merge_here else ""),
        aligned=("Q", "K", "V", "OUT", "PART_O", "PART_ML"),
        num_warps=tuning.warps,
        maxnreg=tuning.max_registers,
        launch_pdl=tuning.pdl,
    )


def merge_variant(shape: Shape, choice: Choice) -> KernelVariant:
    """The variant of the merge kernel that goes with a decode variant."""
    across = shape.config.head_size // (8 * MERGE_WARPS)  # lanes along a warp's part of a row
    arguments = {
        "OUT": f"*{TRITON_TYPES[shape.config.out_dtype]}",
        "SEQ_LENS": "*i32",
        "PART_O": "*fp16",
        "PART_ML": "*fp32",
        "LSE": "*fp32",
        "V_SCALE": "*fp32",
        "num_seqs": "i32",
        "programs": "i32",
        "scale_seq_stride": "i32",
        "scale_head_stride": "i32",
    }
    own = {
        "ROWS": shape.rows,
        "TILE": shape.tile,
        "PACKED": shape.config.kv_format == "e2m3",
        "CHANNEL_SCALES": choice.channel_scales,
        "CHUNK": shape.merged_at_once,
        # Each warp sums its own channels of all pieces: nothing is added across warps.
        "PARTS": gl.BlockedLayout([1, 8], [32 // across, across], [1, MERGE_WARPS], [1, 0]),
        "SEQS": _seqs_layout(shape.config, MERGE_WARPS, each_warp=True),
    }
    constants = _constants(shape, choice) | own
    names = merge_kernel.arg_names[len(arguments) :]
    return KernelVariant(
        merge_kernel,
        tuple(arguments.items()),
        tuple((name, constants[name]) for name in names),
        label=f"merge {_label(shape, choice)}",
        aligned=("OUT", "PART_O", "PART_ML"),
        num_warps=MERGE_WARPS,
        launch_pdl=shape.tuning.pdl,
    )


def _label(shape: Shape, choice: Choice) -> str:
    config = shape.config
    mask = "" if choice.causal else ", not causal"
    return (
        f"{config.num_heads}:{config.num_kv_heads} d {config.head_size} {config.kv_format}, page {config.page_size}, "
        f"q_len {choice.q_len}{mask}"
    )


def _seqs_layout(config: RunnerConfig, warps: int, *, each_warp: bool) -> gl.BlockedLayout:
    # ``each_warp``: every warp holds up to 256 lengths, all warps the same ones, so that sums over them need no shared
    # memory and no barrier; for kernels that can spare the registers.
    lengths = min(8, _max_seqs(config) // 32) if each_warp else max(1, _max_seqs(config) // (32 * warps))
    return gl.BlockedLayout([lengths], [32], [warps], [0])


def _max_seqs(config: RunnerConfig) -> int:
    return max(64, int(triton.next_power_of_2(config.max_num_seqs)))  # fewer save nothing, and cost variants


def _constants(shape: Shape, choice: Choice) -> dict[str, Any]:
    """Constants that the kernels have in common."""
    config, tuning, strides = shape.config, shape.tuning, choice.strides
    d, warps = config.head_size, tuning.warps
    across = min(32, d // 4)  # lanes along a row of the output
    at_once = min(8, int(triton.next_power_of_2(shape.query_rows)))
    return {
        "Q_TOKEN_STRIDE": strides.q_token,
        "Q_HEAD_STRIDE": strides.q_head,
        "OUT_TOKEN_STRIDE": strides.out_token,
        "OUT_HEAD_STRIDE": strides.out_head,
        "PAGE_STRIDE": strides.page,
        "HEAD_STRIDE": strides.head,
        "TOKEN_STRIDE": strides.token,
        "KV_HEADS": config.num_kv_heads,
        "GROUP": config.heads_per_kv_head,
        "Q_LEN": choice.q_len,
        "D": d,
        "PAGE": config.page_size,
        "CAUSAL": choice.causal,
        "WRITE_LSE": choice.write_lse,
        "LEAST": tuning.least_tiles,
        "MAX_SEQS": _max_seqs(config),
        "PDL": tuning.pdl,
        "MERGE_HERE": choice.merge_here,
        "AT_ONCE": at_once,
        # As much as 32 registers of a thread hold, but no more pieces than are merged here as a rule.
        "PIECES": min(MERGE_HERE_PIECES, max(1, 64 * 32 // (max(1, at_once // warps) * d))),
        "OUTPUT": gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0]),
        "MERGED": gl.BlockedLayout([1, 1, d // 32], [1, 1, 32], [1, warps, 1], [2, 1, 0]),
        "SEQS": _seqs_layout(config, warps, each_warp=tuning.kernel == "wgmma"),
    }


def _wide(shape: Shape, _choice: Choice) -> dict[str, Any]:
    d = shape.config.head_size
    return {
        "ROWS": shape.rows,
        "K_WORDS": fragments.k_words(d, WIDE_WARPS, WIDE_TOKENS, packed=False),
        "V_WORDS": fragments.wide_v_words(d),
        "PRODUCT": fragments.wide_product(),
        # Swizzled so that neither a row of weights nor a column of the query meets a bank twice.
        "Q_SHARED": gl.SwizzledSharedLayout(8, 1, 8, [1, 0]),
        "P_SHARED": gl.SwizzledSharedLayout(8, 1, max(1, shape.rows // 8), [1, 0]),
    }


def _wgmma(shape: Shape, _choice: Choice) -> dict[str, Any]:
    d, rows, tuning = shape.config.head_size, shape.rows, shape.tuning
    across = d // 16  # lanes along a row, 16 bytes each
    return {
        "ROWS": rows,
        "TILE": tuning.tokens,
        "STAGES": tuning.stages,
        "COPY": gl.BlockedLayout([1, 16], [32 // across, across], [tuning.warps, 1], [1, 0]),
        "SCORES": gl.NVMMADistributedLayout([3, 0], [tuning.warps, 1], [16, rows, 32]),
        "SUMS": gl.NVMMADistributedLayout([3, 0], [tuning.warps, 1], [16, rows, 16]),
        "BYTES_SHARED": gl.NVMMASharedLayout(128, 8),
        "PAIRS_SHARED": gl.NVMMASharedLayout(128, 16),
        "P_SHARED": gl.NVMMASharedLayout(128, 16),
        "PEAKS_SHARED": gl.SwizzledSharedLayout(1, 1, 1, [0]),
        "PEAKS": gl.BlockedLayout([4], [32], [tuning.warps], [0]),
    }


def _stream(shape: Shape, choice: Choice) -> dict[str, Any]:
    config, tuning = shape.config, shape.tuning
    d, packed = config.head_size, config.kv_format == "e2m3"
    return {
        "PACKED": packed,
        "CHANNEL_SCALES": choice.channel_scales,
        "W": tuning.warps,
        "ROW_GROUPS": tuning.row_groups,
        "R": tuning.rows,
        "T": tuning.tokens,
        "K_WORDS": fragments.k_words(d, tuning.warps, tuning.tokens, packed),
        "V_WORDS": fragments.v_words(d, tuning.warps, tuning.tokens, packed),
        "PRODUCT": fragments.product(tuning.warps),
    }
