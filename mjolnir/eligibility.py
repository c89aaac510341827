"""Static eligibility: can T5 run an attention group at all, and if not, why not.

Takes vLLM's objects but imports nothing of it, so every rule is tested with plain objects. The first rule that
matches gives the reason; users grep for these texts.
"""

from collections.abc import Mapping
from typing import Any

from mjolnir.env import BackendSettings
from mjolnir.names import FP6_KV_DTYPE
from mjolnir.runner import HEAD_SIZES, PAGE_SIZES, unavailable_reason

# vLLM's name of a KV format to its quantisation mode and our name.
T5_KV_DTYPES = {
    "fp8": ("FP8_PER_TENSOR", "fp8"),
    "fp8_e4m3": ("FP8_PER_TENSOR", "fp8"),
    FP6_KV_DTYPE: ("FP6_E2M3", "e2m3"),
}
MODEL_DTYPES = ("bfloat16", "float16")
_NO_WINDOW = (None, -1, (-1, -1))


def ineligible_reason(
    spec: Any, layers: Mapping[str, Any] | None, vllm_config: Any, device_type: str, settings: BackendSettings
) -> str | None:
    """Why T5 can't run an attention group, or None when it can.

    Args:
        spec: the group's KV cache spec, with the kernel's block size.
        layers: the group's attention layers by name; None when they could not be looked up.
        vllm_config: vLLM's configuration.
        device_type: ``cpu`` or ``cuda``.
        settings: the backend's settings.
    """
    if settings.disabled:
        return "MJOLNIR_ATTN_DISABLE set"
    return (
        _spec_reason(spec, vllm_config)
        or _config_reason(vllm_config)
        or unavailable_reason(device_type, kv_format(vllm_config), spec.head_size)
        or _layers_reason(layers)
    )


def kv_format(vllm_config: Any) -> str:
    """Our name of the KV format of an eligible group."""
    return T5_KV_DTYPES[vllm_config.cache_config.cache_dtype][1]


def _spec_reason(spec: Any, vllm_config: Any) -> str | None:
    """Rules about the shape and format of the group's pages."""
    dtype = vllm_config.cache_config.cache_dtype
    head_size = getattr(spec, "head_size", None)
    if dtype not in T5_KV_DTYPES:
        return f"kv cache dtype '{dtype}' is not one of {', '.join(T5_KV_DTYPES)}"
    # The group's own format: layers may have been told to skip the cache's quantisation.
    mode, name = T5_KV_DTYPES[dtype]
    if spec.kv_quant_mode.name != mode or getattr(spec.dtype, "itemsize", 1) != 1:
        wanted = "fp8 per tensor" if name == "fp8" else FP6_KV_DTYPE
        return f"kv cache dtype of this group is {spec.kv_quant_mode.name.lower()}, not {wanted}"
    if head_size not in HEAD_SIZES:
        return f"head_size {head_size} is not one of {', '.join(map(str, HEAD_SIZES))}"
    if spec.head_size_v != head_size:
        return f"K/V head sizes differ ({head_size} and {spec.head_size_v})"
    if getattr(spec, "sliding_window", None):
        return f"sliding-window KV spec ({spec.sliding_window} tokens)"
    if getattr(spec, "attention_chunk_size", None):
        return f"chunked local attention ({spec.attention_chunk_size} tokens)"
    if spec.block_size not in PAGE_SIZES:
        return f"block size {spec.block_size} is not one of {', '.join(map(str, PAGE_SIZES))}"
    cell = None if name == "fp8" else 2 * head_size * 6 // 8
    if spec.tokens_per_state != 1 or spec.num_head_slots is not None or spec.state_content_bytes != cell:
        return "KV cells are not one K and one V row per token and head"
    return None


def _config_reason(vllm_config: Any) -> str | None:
    """Rules about the model and how it is run."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in MODEL_DTYPES:
        return f"model dtype {dtype} is not one of {', '.join(MODEL_DTYPES)}"
    if parallel.decode_context_parallel_size > 1:
        return f"decode context parallel size {parallel.decode_context_parallel_size}"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return f"prefill context parallel size {parallel.prefill_context_parallel_size}"
    if getattr(model, "rswa_window", None) is not None:
        return f"reference sliding window attention ({model.rswa_window} tokens)"
    return None


def _layers_reason(layers: Mapping[str, Any] | None) -> str | None:
    """Rules about each layer of the group."""
    if layers is None:
        return "the layers of this group could not be looked up in this vLLM"
    for name in sorted(layers):
        reason = layer_reason(layers[name])
        if reason:
            return f"layer {name}: {reason}"
    return None


def layer_reason(layer: Any) -> str | None:
    """Why T5 can't run one layer, or None when it can."""
    impl = layer.impl
    reason = impl_reason(impl)
    if reason:
        return reason
    attn_type = getattr(layer, "attn_type", "decoder")
    if getattr(attn_type, "value", attn_type) != "decoder":
        return f"attention type {getattr(attn_type, 'value', attn_type)}"
    if getattr(layer, "kv_cache_dtype", "fp8") not in T5_KV_DTYPES:
        return f"kv cache dtype '{layer.kv_cache_dtype}'"
    if getattr(layer, "use_alibi_sqrt", False):
        return "ALiBi (square root)"
    if getattr(layer, "mm_prefix_clamp_sliding_window", False) or getattr(impl, "chunk_lookback", -1) > -1:
        return "a mask of its own (multimodal prefix or chunked look-back)"
    return None


def impl_reason(impl: Any) -> str | None:
    """Why T5 can't stand in for an impl's attention arithmetic, or None when it can."""
    window = getattr(impl, "sliding_window", None)
    if (tuple(window) if isinstance(window, list) else window) not in _NO_WINDOW:
        return "sliding window"
    if getattr(impl, "logits_soft_cap", None):
        return "logits soft-cap"
    if getattr(impl, "sinks", None) is not None:
        return "attention sinks"
    if getattr(impl, "alibi_slopes", None) is not None:
        return "ALiBi"
    return None
