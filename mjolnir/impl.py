"""The impl: one layer's attention, on T5 when the builder says so, on the fallback otherwise."""

from typing import TYPE_CHECKING, Any

import torch

from mjolnir import fp8_query, packed, scratch, tensor_scales
from mjolnir.eligibility import impl_reason
from mjolnir.env import BackendSettings
from mjolnir.errors import ConfigurationError, LayoutError
from mjolnir.layouts import PagedKV, detect_layout, split_kv
from mjolnir.metadata import MjolnirMetadata, SplitMetadata
from mjolnir.observation import observer
from mjolnir.packed import ExpandedMetadata
from mjolnir.reference.e2m3 import row_bytes

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl
else:
    AttentionImpl = object

MODEL_DTYPES = (torch.bfloat16, torch.float16)


class ImplMixin(AttentionImpl):
    """What Mjolnir changes in its fallback's impl."""

    # T5's LSE is not wired to vLLM's context parallelism.
    can_return_lse_for_decode = False
    base_impl: type[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.packed, args, kwargs = packed.for_fallback(args, kwargs)
        super().__init__(*args, **kwargs)
        if self.packed:
            # The layer would quantise Q for a cache that the fallback never sees.
            self.supports_quant_query_input = False
        self._row = row_bytes(self.head_size) if self.packed else self.head_size
        self._observer = observer()
        if self.packed and self._observer is not None:
            raise ConfigurationError(
                "kv cache dtype fp6_e2m3: can't be calibrated on; accepted: auto (the model's own)"
            )
        self._t5_reason = impl_reason(self)
        settings = BackendSettings.from_env()
        self._forced_layout = settings.kv_layout
        self._of_quantised_query = None
        if not settings.disabled and not self._t5_reason and fp8_query.wants(self):
            self._of_quantised_query = fp8_query.for_quantised_query(self, self.base_impl)
            self.supports_quant_query_input = False
        self._views: tuple[int, tuple[int, ...], PagedKV] | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: T5 writes the model's dtype."""
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called after weights were loaded, and after each time they were loaded anew: scales are put in place.

        Raises:
            ConfigurationError: packed pages, and no scale file.
            ScalesError: the scale file does not fit this model.
        """
        super().process_weights_after_loading(act_dtype)
        if self.packed:
            from vllm.config import get_current_vllm_config  # noqa: PLC0415

            packed.prepare_layer(self, get_current_vllm_config(), act_dtype)
        tensor_scales.weights_loaded()

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write a step's new K and V rows to the cache."""
        if self._observer is not None:
            self._observer.see(layer.layer_name, key, value, slot_mapping)
        if not self.packed:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        write_kv, _ = packed.store_for(kv_cache.device)
        views = self._kv_views(kv_cache, kv_cache.shape[2])
        write_kv(*packed.written_rows(layer, key, value), views, slot_mapping, *packed.write_scales(layer))

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
            RuntimeError: a T5 step reached a layer that T5 can't run, or a split step a capture.
            ValueError: a T5 step with a quantised query or output.
        """
        rows, scales = (query, key, value), (output_scale, output_block_scale)
        if isinstance(attn_metadata, MjolnirMetadata):
            self._forward_t5(layer, query, kv_cache, attn_metadata, output, scales)
            return output
        if isinstance(attn_metadata, SplitMetadata):
            self._forward_split(layer, rows, kv_cache, attn_metadata, output, scales, **kwargs)
            return output
        if isinstance(attn_metadata, ExpandedMetadata):
            return self._forward_expanded(layer, *rows, kv_cache, attn_metadata, output, **kwargs)
        fallback = super().forward
        if self._of_quantised_query is not None and attn_metadata is not None:
            fallback = self._of_quantised_query.forward
            rows = (fp8_query.quantise(query, layer._q_scale, self.num_kv_heads), key, value)
        result: torch.Tensor = fallback(layer, *rows, kv_cache, attn_metadata, output, *scales, **kwargs)
        return result

    def _forward_split(
        self,
        layer: Any,
        rows: tuple[Any, Any, Any],
        kv_cache: torch.Tensor,
        metadata: SplitMetadata,
        output: torch.Tensor,
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
        **kwargs: Any,
    ) -> None:
        """A step of both: T5's rows come first, the fallback's follow, padding is left alone.

        Under piecewise graphs attention runs between the pieces and is in none of them.
        """
        if rows[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a split step is being captured; set MJOLNIR_ATTN_SPLIT_MIXED=0 and report this")
        begin = metadata.head.num_actual_tokens
        self._forward_t5(layer, rows[0][:begin], kv_cache, metadata.head, output[:begin], scales)
        tail = slice(begin, begin + metadata.tail_tokens)
        query, key, value = (None if part is None else part[tail] for part in rows)
        self.forward(layer, query, key, value, kv_cache, metadata.tail, output[tail], *scales, **kwargs)

    def _forward_t5(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: MjolnirMetadata,
        output: torch.Tensor,
        output_scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        if self._t5_reason:
            raise RuntimeError(
                f"a T5 step reached a layer with {self._t5_reason}; set MJOLNIR_ATTN_DISABLE=1 and report this"
            )
        if any(scale is not None for scale in output_scales):
            raise ValueError("T5 writes no quantised output")
        if query.dtype not in MODEL_DTYPES:
            raise ValueError(f"T5 takes a query of the model's dtype, not {query.dtype}")
        runner, plan = metadata.runner, metadata.plan
        views = self._kv_views(kv_cache, runner.config.page_size)
        scales = packed.read_scales(layer) if self.packed else (layer._k_scale, layer._v_scale)

        def attend(query: torch.Tensor, output: torch.Tensor) -> None:
            rows, into = (part.view(-1, self.num_heads, self.head_size) for part in (query, output))
            runner.run(plan, rows, into, views, *scales, self.scale)

        if self.packed:
            packed.turned_attention(layer, query, output, metadata.num_actual_tokens, attend)
        else:
            attend(query, output)

    def _forward_expanded(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: ExpandedMetadata,
        output: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """A fallback step over packed pages: those in use are expanded, a run of requests after the other."""
        _, expand_pages = packed.store_for(kv_cache.device)
        page_size = kv_cache.shape[2]
        views = self._kv_views(kv_cache, page_size)
        shape = self.num_kv_heads, page_size, self.head_size
        forward = super().forward

        def attend(query: torch.Tensor, output: torch.Tensor) -> None:
            for run in metadata.runs:
                pages = scratch.pages(kv_cache.device, len(run.pages.sources), *shape, query.dtype)
                expand_pages(views, run.pages.sources, pages, *packed.read_scales(layer))
                rows = [None if part is None else part[run.tokens] for part in (query, key, value)]
                forward(layer, *rows, pages, run.metadata, output[run.tokens], None, None, **kwargs)

        packed.turned_attention(layer, query, output, metadata.num_actual_tokens, attend)
        return output

    def _kv_views(self, kv_cache: torch.Tensor, page_size: int) -> PagedKV:
        """K and V of this layer's cache; looked up once, until vLLM binds another cache."""
        key = kv_cache.data_ptr(), tuple(kv_cache.shape)
        if self._views is None or self._views[:2] != key:
            layout = self._forced_layout or detect_layout(key[1], self.num_kv_heads, page_size, self._row)
            views = split_kv(kv_cache, layout, self._row)
            if views.k.shape[1] != page_size:
                raise LayoutError(
                    f"KV cache of shape {key[1]} read as {layout} has pages of {views.k.shape[1]} tokens, the plan "
                    f"has {page_size}; set MJOLNIR_ATTN_KV_LAYOUT or MJOLNIR_ATTN_DISABLE=1"
                )
            self._views = (*key, views)
        return self._views[2]
