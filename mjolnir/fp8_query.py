"""Fallbacks that multiply e4m3 by e4m3 want Q in e4m3 too; T5 takes it as the model made it.

vLLM's layer quantises Q ahead of an impl that says it supports that, on every step. Ours says no, so that T5 gets Q
as it is, and quantises for the steps of the fallback alone, with the layer's own scale, as the layer would have.
"""

import functools
from typing import Any

import torch


def wants(impl: Any) -> bool:
    """Whether the layer would quantise Q for an impl."""
    dtype = impl.kv_cache_dtype
    quantised = dtype.startswith("fp8") and not dtype.endswith("per_token_head")
    return quantised and bool(impl.supports_quant_query_input)


def for_quantised_query(impl: Any, base: Any) -> Any:
    """An impl as its fallback's class has it, which believes that its layer quantises Q.

    It has no state of its own: both see each other's changes. A switch on the impl itself would be seen by other
    threads, which run other parts of a batch.
    """
    twin: Any = object.__new__(_twin_class(base))
    twin.__dict__ = impl.__dict__
    return twin


def quantise(query: torch.Tensor, scale: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Q in e4m3, as vLLM's layer quantises it.

    Args:
        query: (tokens, num_heads, head_size) in the model's dtype.
        scale: one element, or one a KV head.
        num_kv_heads: KV heads.
    """
    from vllm import _custom_ops  # noqa: PLC0415

    rows = query.reshape(query.shape[0], -1)
    groups = None if scale.numel() == 1 else (-1, rows.shape[1] // num_kv_heads)
    codes, _ = _custom_ops.scaled_fp8_quant(rows, scale, group_shape=groups)
    codes = codes.view(query.shape)
    return codes


@functools.cache
def _twin_class(base: Any) -> Any:
    return type(f"{base.__name__}OfQuantisedQuery", (base,), {"supports_quant_query_input": property(lambda _: True)})
