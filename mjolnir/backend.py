"""``mjolnir.backend.MjolnirAttentionBackend``: the class that vLLM selects.

It subclasses the fallback's backend class, and its builder and impl subclass the fallback's, so that cache
layout, cache write, prefill and validation are the fallback's own. Which one that is depends on the model, so
the classes are made when the attribute is first asked for, not when this module is imported.
"""

from typing import TYPE_CHECKING, Any

from mjolnir import BACKEND_NAME, packed
from mjolnir.builder import BuilderMixin
from mjolnir.env import BackendSettings
from mjolnir.fallback import current_fallback
from mjolnir.impl import ImplMixin
from mjolnir.names import FP6_KV_DTYPE
from mjolnir.plugin import has_native_member
from mjolnir.runner import HEAD_SIZES, PAGE_SIZES

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend
else:
    AttentionBackend = object


class BackendMixin(AttentionBackend):
    """What Mjolnir changes in its fallback's backend class."""

    accept_output_buffer = True
    base_backend: type[Any]

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM's enum finds this class again."""
        return BACKEND_NAME if has_native_member() else "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """Our impl over the fallback's."""
        base = cls.base_backend.get_impl_cls()
        return _composed("MjolnirImpl", ImplMixin, base, base_impl=base)

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """Our metadata builder over the fallback's."""
        return _composed(
            "MjolnirMetadataBuilder",
            BuilderMixin,
            cls.base_backend.get_builder_cls(),
            fallback_name=cls.base_backend.get_name(),
        )

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """T5's page sizes that the fallback takes too; the fallback's own where there is none."""
        base_sizes = cls.base_backend.get_supported_kernel_block_sizes(kv_cache_spec)
        return intersect_block_sizes(base_sizes)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec with the size of its pages, where they are packed."""
        return packed.packed_spec(spec) if packed.is_packed(spec) else super().customize_spec(spec)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """What the fallback takes, and packed 6-bit pages, which it sees expanded."""
        return bool(super().supports_kv_cache_dtype("auto" if kv_cache_dtype == FP6_KV_DTYPE else kv_cache_dtype))

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        """Why settings do not go together, or None."""
        if kv_cache_dtype == FP6_KV_DTYPE:
            if head_size not in HEAD_SIZES:
                accepted = ", ".join(map(str, HEAD_SIZES))
                return f"{FP6_KV_DTYPE} with head size {head_size} (accepted: {accepted})"
            kv_cache_dtype = "auto"
        reason: str | None = super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)
        return reason

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Where T5 takes a parallel drafter's blocks, or the fallback does."""
        return BackendSettings.from_env().noncausal or bool(super().supports_non_causal())

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: how a sequence is split depends on what else is in the batch."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: steps are classified by the host's query lengths, which must be exact."""
        return False


def intersect_block_sizes(base_sizes: list[Any]) -> list[Any]:
    """T5's page sizes that a fallback's list admits; the list itself where none is.

    Args:
        base_sizes: numbers, which must match exactly, and vLLM's ``MultipleOf``, which must divide.
    """
    common = [
        size
        for size in PAGE_SIZES
        if any(size % base.base == 0 if hasattr(base, "base") else size == base for base in base_sizes)
    ]
    return common or base_sizes


def backend_class(base: type[Any]) -> type[Any]:
    """Our backend class over a fallback's; the same one for the same fallback."""
    return _composed("MjolnirAttentionBackend", BackendMixin, base, base_backend=base)


_classes: dict[tuple[str, type[Any]], type[Any]] = {}


def _composed(name: str, mixin: type[Any], base: type[Any], **attributes: Any) -> type[Any]:
    """A subclass of both; made once, since vLLM tells attention groups apart by their classes."""
    key = name, base
    if key not in _classes:
        attributes |= {"__module__": __name__, "__doc__": mixin.__doc__}
        _classes[key] = type(name, (mixin, base), attributes)
    return _classes[key]


def __getattr__(name: str) -> Any:
    if name == "MjolnirAttentionBackend":
        return backend_class(current_fallback())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
