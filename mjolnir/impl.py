"""The impl: one layer's attention, on T5 when the builder says so, on the fallback otherwise."""

from typing import TYPE_CHECKING, Any

import torch

from mjolnir.eligibility import impl_reason
from mjolnir.env import BackendSettings
from mjolnir.errors import LayoutError
from mjolnir.layouts import PagedKV, detect_layout, split_kv
from mjolnir.metadata import MjolnirMetadata

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl
else:
    AttentionImpl = object

MODEL_DTYPES = (torch.bfloat16, torch.float16)


class ImplMixin(AttentionImpl):
    """What Mjolnir changes in its fallback's impl."""

    # T5's LSE is not wired to vLLM's context parallelism.
    can_return_lse_for_decode = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._t5_reason = impl_reason(self)
        self._forced_layout = BackendSettings.from_env().kv_layout
        self._views: tuple[int, tuple[int, ...], PagedKV] | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: T5 writes the model's dtype."""
        return False

    # These fusions write the cache behind the impl's back.
    def fused_rope_kvcache_supported(self) -> bool:
        """No."""
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """No."""
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        """No."""
        return False

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer into ``output``; the cache has this step's K and V already.

        Raises:
            RuntimeError: a T5 step reached a layer that T5 can't run.
            ValueError: a T5 step with a quantised query or output.
        """
        if not isinstance(attn_metadata, MjolnirMetadata):
            result: torch.Tensor = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
                **kwargs,
            )
            return result
        if self._t5_reason:
            raise RuntimeError(
                f"a T5 step reached a layer with {self._t5_reason}; set MJOLNIR_ATTN_DISABLE=1 and report this"
            )
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("T5 writes no quantised output")
        if query.dtype not in MODEL_DTYPES:
            raise ValueError(f"T5 takes a query of the model's dtype, not {query.dtype}")
        attn_metadata.runner.run(
            attn_metadata.plan,
            query.view(-1, self.num_heads, self.head_size),
            output.view(-1, self.num_heads, self.head_size),
            self._kv_views(kv_cache, attn_metadata),
            layer._k_scale,
            layer._v_scale,
            self.scale,
        )
        return output

    def _kv_views(self, kv_cache: torch.Tensor, metadata: MjolnirMetadata) -> PagedKV:
        """K and V of this layer's cache; looked up once, until vLLM binds another cache."""
        key = kv_cache.data_ptr(), tuple(kv_cache.shape)
        if self._views is None or self._views[:2] != key:
            page_size = metadata.runner.config.page_size
            layout = self._forced_layout or detect_layout(key[1], self.num_kv_heads, page_size, self.head_size)
            views = split_kv(kv_cache, layout, self.head_size)
            if views.k.shape[1] != page_size:
                raise LayoutError(
                    f"KV cache of shape {key[1]} read as {layout} has pages of {views.k.shape[1]} tokens, the plan "
                    f"has {page_size}; set MJOLNIR_ATTN_KV_LAYOUT or MJOLNIR_ATTN_DISABLE=1"
                )
            self._views = (*key, views)
        return self._views[2]
