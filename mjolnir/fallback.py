"""Which stock backend runs everything that T5 does not take.

The decision needs the model's configuration, so it is made on first use inside vLLM's config context, and only
then kept for the process; an answer given earlier (a tool, a test, an argument parser) is not.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mjolnir import BACKEND_NAME, fa4_probe
from mjolnir.env import BackendSettings
from mjolnir.errors import ConfigurationError
from mjolnir.names import FP6_KV_DTYPE, FP8_KV_DTYPES

logger = logging.getLogger("vllm.mjolnir")

TORCH_REF = "TORCH_REF"
GPU_ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
NOT_A_FALLBACK = ("CUSTOM", BACKEND_NAME)


@dataclass(frozen=True)
class ModelNeeds:
    """What the fallback must be able to serve.

    Attributes:
        device_type: ``cpu`` or ``cuda``.
        head_size: elements of a head.
        dtype: the model's dtype.
        kv_cache_dtype: as given to vLLM.
        block_size: tokens of a page if the user chose one.
    """

    device_type: str
    head_size: int
    dtype: Any
    kv_cache_dtype: str
    block_size: int | None = None


@dataclass(frozen=True)
class Choice:
    """A fallback and why it was taken."""

    name: str
    why: str


def choose(explicit: str, needs: ModelNeeds | None, refusal: Callable[[str, ModelNeeds], str | None]) -> Choice:
    """Choose the fallback by name.

    Args:
        explicit: the user's choice, or empty.
        needs: what it must serve; None when that is not known yet.
        refusal: says why a backend can't serve the needs, or None when it can. Not asked for an explicit choice.

    Raises:
        ConfigurationError: the user's choice can't be a fallback.
    """
    on_cpu = needs is not None and needs.device_type == "cpu"
    if explicit in NOT_A_FALLBACK:
        raise ConfigurationError(
            f"MJOLNIR_ATTN_FALLBACK={explicit}: is no fallback; accepted: a stock backend, as {', '.join(GPU_ORDER)}"
        )
    if on_cpu:
        if explicit not in ("", TORCH_REF):
            raise ConfigurationError(
                f"MJOLNIR_ATTN_FALLBACK={explicit}: no fallback on a CPU: only {TORCH_REF} shares KV pages with T5; "
                f"accepted: {TORCH_REF}"
            )
        return Choice(TORCH_REF, "the only fallback on a CPU")
    if explicit == TORCH_REF:
        raise ConfigurationError(
            f"MJOLNIR_ATTN_FALLBACK={TORCH_REF}: is for CPUs; accepted: a stock backend, as {', '.join(GPU_ORDER)}"
        )
    if explicit:
        return Choice(explicit, "chosen by MJOLNIR_ATTN_FALLBACK")
    if needs is None:
        return Choice(GPU_ORDER[0], "first in order; the model is not known yet")
    refused: list[str] = []
    for name in GPU_ORDER:
        reason = refusal(name, needs)
        if reason is None:
            return Choice(name, "; ".join(refused) or "first in order")
        refused.append(f"{name}: {reason}")
    raise ConfigurationError(f"no fallback can serve this model: {'; '.join(refused)}")


def current_fallback() -> type[Any]:
    """The fallback's backend class for the current vLLM configuration; see the module's text for when it is kept.

    Raises:
        ConfigurationError: the user's choice can't be a fallback, or none serves the model.
        ValueError: vLLM does not know the chosen name; lists those it knows.
    """
    needs = _current_needs()
    if needs is None:
        return _backend_class(choose(BackendSettings.from_env().fallback, None, _refusal).name)
    return _decide(needs)


def fallback_name(head_size: int | None = None) -> str:
    """Name of the fallback for the current configuration; what ``fa_utils.mjolnir_fallback_name`` answers.

    Args:
        head_size: asked for instead of the model's; outside of a configuration, of a bf16 model with an fp8 cache.

    Raises:
        ConfigurationError: as :func:`current_fallback`.
    """
    needs = _current_needs()
    if head_size is not None:
        if needs is None:
            import torch  # noqa: PLC0415

            needs = ModelNeeds("cuda", head_size, torch.bfloat16, FP8_KV_DTYPES[0])
        needs = replace(needs, head_size=head_size)
    return choose(BackendSettings.from_env().fallback, needs, _refusal).name


@functools.cache
def _decide(needs: ModelNeeds) -> type[Any]:
    choice = choose(BackendSettings.from_env().fallback, needs, _refusal)
    log = (
        logger.warning
        if choice.name in GPU_ORDER[1:] and choice.why != "chosen by MJOLNIR_ATTN_FALLBACK"
        else logger.info
    )
    log("Mjolnir: fallback=%s (%s)", choice.name, choice.why)
    return _backend_class(choice.name)


def _backend_class(name: str) -> type[Any]:
    if name == TORCH_REF:
        from mjolnir.reference.backend import TorchReferenceBackend  # noqa: PLC0415

        return TorchReferenceBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415

    backend: type[Any] = AttentionBackendEnum[name].get_class()
    return backend


def _current_needs() -> ModelNeeds | None:
    """What the model in vLLM's current config context needs; None outside of one."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        # The kind of machine is known all the same.
        return ModelNeeds("cpu", 0, None, "auto") if current_platform.is_cpu() else None
    cache = config.cache_config
    return ModelNeeds(
        device_type=current_platform.device_type,
        head_size=config.model_config.get_head_size(),
        dtype=config.model_config.dtype,
        # Packed pages are expanded for the fallback to the model's own dtype.
        kv_cache_dtype="auto" if cache.cache_dtype == FP6_KV_DTYPE else cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
    )


def _refusal(name: str, needs: ModelNeeds) -> str | None:
    """Why a stock backend can't serve a model on this device, from its own rules; None when it can."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    try:
        backend = _backend_class(name)
    except ImportError as error:
        return f"not installed ({error})"
    # vLLM asks a FlashAttention class whether the KV dtype fits for the head size of its current config only.
    if name == "FLASH_ATTN" and needs.kv_cache_dtype in FP8_KV_DTYPES:
        from vllm.v1.attention.backends import fa_utils  # noqa: PLC0415

        if not fa_utils.flash_attn_supports_kv_cache_dtype(
            needs.kv_cache_dtype, head_size=needs.head_size, supports_fa4_hd256=True
        ):
            return _thors_refusal(needs) or "FlashAttention can't read this fp8 KV cache on this GPU"
        if _on_thor() and str(needs.dtype) == "torch.float16":
            return "FlashAttention 4 writes bf16 where the KV cache is fp8, but the model's dtype is float16"
    reasons = backend.validate_configuration(
        head_size=needs.head_size,
        dtype=needs.dtype,
        kv_cache_dtype=needs.kv_cache_dtype,
        block_size=needs.block_size,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=current_platform.get_device_capability(),
        attn_type="decoder",
    )
    return ", ".join(reasons) or None


def _on_thor() -> bool:
    from vllm.platforms import current_platform  # noqa: PLC0415

    return bool(current_platform.is_device_capability_family(110))


def _thors_refusal(needs: ModelNeeds) -> str | None:
    """What FlashAttention 4's probe has to say on sm_110; None elsewhere, and where it has nothing against it."""
    return fa4_probe.refusal(needs.head_size, fp8=True) if _on_thor() else None
