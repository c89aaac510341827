"""The backend class: the fallback's, but for what is stated here."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import MultipleOf

from mjolnir import backend
from mjolnir.backend import BackendMixin, backend_class, intersect_block_sizes
from mjolnir.builder import BuilderMixin
from mjolnir.impl import ImplMixin
from mjolnir.reference.backend import TorchReferenceBackend, TorchReferenceImpl, TorchReferenceMetadataBuilder

Backend = backend_class(TorchReferenceBackend)


@pytest.mark.parametrize(
    ("base", "ours"),
    [
        ([16, 32, 64], [16, 32, 64]),  # FlashInfer without trtllm-gen: 128 is an assertion there
        ([16, 32, 64, 128, 256], [16, 32, 64, 128]),
        ([MultipleOf(16)], [16, 32, 64, 128]),
        ([MultipleOf(1)], [16, 32, 64, 128]),
        ([MultipleOf(64)], [64, 128]),
        ([128], [128]),
        ([48, MultipleOf(128)], [128]),
        ([MultipleOf(256)], [MultipleOf(256)]),
        ([48], [48]),
        ([], []),
    ],
)
def test_page_sizes_that_both_take_or_else_the_fallbacks_own(base, ours):
    sizes = intersect_block_sizes(base)
    assert [getattr(size, "base", size) for size in sizes] == [getattr(size, "base", size) for size in ours]


def test_page_sizes_are_asked_for_the_spec():
    asked = []

    class Base(TorchReferenceBackend):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec=None):
            asked.append(kv_cache_spec)
            return [32]

    spec = SimpleNamespace()
    assert backend_class(Base).get_supported_kernel_block_sizes(spec) == [32]
    assert backend_class(Base).get_supported_kernel_block_sizes() == [32]
    assert asked == [spec, None]


def test_what_the_fallback_might_promise_and_t5_does_not_keep():
    class Base(TorchReferenceBackend):
        @classmethod
        def supports_batch_invariance(cls):
            return True

        @classmethod
        def supports_device_cpu_query_lens_mismatch(cls):
            return True

    assert backend_class(Base).supports_batch_invariance() is False
    assert backend_class(Base).supports_device_cpu_query_lens_mismatch() is False


def test_the_rest_is_the_fallbacks():
    assert issubclass(Backend, TorchReferenceBackend)
    assert Backend.base_backend is TorchReferenceBackend
    assert Backend.accept_output_buffer is True
    assert Backend.forward_includes_kv_cache_update is False
    assert Backend.supported_kv_cache_layouts() == TorchReferenceBackend.supported_kv_cache_layouts()
    assert Backend.supported_kv_cache_dtypes == TorchReferenceBackend.supported_kv_cache_dtypes
    assert Backend.supports_sink() is True


def test_builder_and_impl_are_ours_over_the_fallbacks():
    assert Backend.get_builder_cls().__mro__[1:3] == (BuilderMixin, TorchReferenceMetadataBuilder)
    assert Backend.get_builder_cls().fallback_name == "TORCH_REF"
    assert Backend.get_impl_cls().__mro__[1:3] == (ImplMixin, TorchReferenceImpl)
    assert Backend.__mro__[1:3] == (BackendMixin, TorchReferenceBackend)


def test_classes_are_made_once():
    """vLLM tells attention groups apart by them."""
    assert backend_class(TorchReferenceBackend) is Backend
    assert Backend.get_builder_cls() is Backend.get_builder_cls()
    assert Backend.get_impl_cls() is Backend.get_impl_cls()


def test_another_fallback_is_another_class():
    other = backend_class(type("Other", (TorchReferenceBackend,), {}))
    assert other is not Backend
    assert other.base_backend is not Backend.base_backend


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Backend, "MjolnirAttentionBackend"),
        (Backend.get_builder_cls(), "MjolnirMetadataBuilder"),
        (Backend.get_impl_cls(), "MjolnirImpl"),
    ],
)
def test_names_and_documentation(cls, name):
    assert (cls.__module__, cls.__qualname__) == ("mjolnir.backend", name)
    assert cls.__doc__.startswith("What Mjolnir changes in its fallback's")


def test_class_is_made_for_the_fallback_of_the_moment(monkeypatch):
    monkeypatch.setattr(backend, "current_fallback", lambda: TorchReferenceBackend)
    assert importlib.import_module("mjolnir.backend").MjolnirAttentionBackend is Backend
    other = type("Other", (TorchReferenceBackend,), {})
    monkeypatch.setattr(backend, "current_fallback", lambda: other)
    assert backend.MjolnirAttentionBackend.base_backend is other


def test_no_other_name_is_made_up():
    with pytest.raises(AttributeError, match=r"^module 'mjolnir\.backend' has no attribute 'Backend'$"):
        backend.Backend  # noqa: B018


@pytest.mark.parametrize(
    ("wish", "reasons"),
    [
        ({}, []),
        ({"kv_cache_dtype": "auto"}, []),
        ({"kv_cache_dtype": "fp8_e5m2", "head_size": 96}, []),  # T5 does not take them, the fallback does
        ({"kv_cache_dtype": "nvfp4"}, ["kv_cache_dtype not supported"]),
        ({"attn_type": "encoder_decoder"}, ["attention type encoder_decoder not supported"]),
        ({"use_batch_invariant": True}, ["batch invariance not supported"]),
        ({"block_size": 8}, ["block_size not supported"]),
    ],
)
def test_validation_by_vllms_rules(wish, reasons):
    values = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
    }
    assert Backend.validate_configuration(**values | wish) == reasons
