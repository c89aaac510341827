"""TORCH_REF: a stock-like vLLM attention backend in plain PyTorch, the fallback on a machine without a GPU.

It takes what vLLM's decoder models ask for (any head size, e4m3, e5m2 and float caches, sliding windows,
soft-caps, ALiBi, sinks), so that a model T5 can't run still serves.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from mjolnir.reference import paged_sdpa

FLOAT8_FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class TorchReferenceBackend(AttentionBackend):
    """Names what the backend accepts; see vLLM's `AttentionBackend`."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FLOAT8_FORMATS]

    @staticmethod
    def get_name() -> str:
        """Name in logs and metrics; it is no member of vLLM's enum and can't be selected by itself."""
        return "TORCH_REF"

    @staticmethod
    def get_impl_cls() -> type["TorchReferenceImpl"]:
        """The impl."""
        return TorchReferenceImpl

    @staticmethod
    def get_builder_cls() -> type["TorchReferenceMetadataBuilder"]:
        """The metadata builder."""
        return TorchReferenceMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
        """Any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Head-major: the tokens of a page and head are contiguous, which T5's executor reads fastest."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks take weight and have no value."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """By mask."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """By mask."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder attention over the paged cache, nothing else."""
        return bool(attn_type == AttentionType.DECODER)


@dataclass
class TorchReferenceMetadata:
    """What `TorchReferenceImpl.forward` reads of a step; the tensors are vLLM's own.

    Attributes:
        num_actual_tokens: query tokens of the step.
        query_start: start of each request in the query tensor, and the end of the last.
        lengths: tokens of each sequence, the new ones included.
        query_start_loc: (num_reqs + 1,) int32.
        seq_lens: (num_reqs,) int32.
        block_table: (num_reqs, max_blocks) int32.
        slot_mapping: (num_actual_tokens,) int64.
        causal: whether a query token sees only keys up to its own position.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start: list[int]
    lengths: list[int]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class TorchReferenceMetadataBuilder(AttentionMetadataBuilder[TorchReferenceMetadata]):
    """Brings the host's lists, once a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TorchReferenceMetadata:
        """Metadata of one step.

        Raises:
            ValueError: a mask that differs between requests.
        """
        cam = common_attn_metadata
        if isinstance(cam.causal, torch.Tensor):
            raise ValueError("TORCH_REF takes one causal flag a step, not one a request")
        return TorchReferenceMetadata(
            num_actual_tokens=cam.num_actual_tokens,
            max_query_len=cam.max_query_len,
            max_seq_len=cam.max_seq_len,
            query_start=cam.query_start_loc_cpu[: cam.num_reqs + 1].tolist(),
            lengths=cam.seq_lens[: cam.num_reqs].tolist(),
            query_start_loc=cam.query_start_loc,
            seq_lens=cam.seq_lens,
            block_table=cam.block_table_tensor,
            slot_mapping=cam.slot_mapping,
            causal=cam.causal,
        )


class TorchReferenceImpl(AttentionImpl[TorchReferenceMetadata]):
    """One layer's attention; see vLLM's `AttentionImpl`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.float8 = FLOAT8_FORMATS.get(kv_cache_dtype)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a step's new K and V rows to the cache."""
        paged_sdpa.write_kv(key, value, kv_cache, slot_mapping, layer._k_scale, layer._v_scale, self.float8)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TorchReferenceMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer over the cache, into ``output``.

        Raises:
            ValueError: a quantised output was asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("TORCH_REF writes no quantised output")
        if attn_metadata is None:  # vLLM measures memory or warms up: there is no cache yet
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        paged_sdpa.attend(
            query[:tokens],
            output[:tokens],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start,
            attn_metadata.lengths,
            softmax_scale=self.scale,
            causal=attn_metadata.causal,
            rules=paged_sdpa.MaskRules(self.sliding_window, self.logits_soft_cap, self.alibi_slopes, self.sinks),
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
            float8=self.float8,
        )
        return output
