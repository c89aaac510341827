"""Layers, configurations and steps as the metadata builder looks at them."""

import itertools
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from mjolnir import telemetry
from mjolnir.backend import backend_class
from mjolnir.builder import BuilderMixin
from mjolnir.counters import read
from mjolnir.reference.backend import TorchReferenceBackend

Builder = backend_class(TorchReferenceBackend).get_builder_cls()
ALWAYS, UNIFORM_BATCH = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH
SINGLE_TOKEN, NEVER = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.NEVER


class Layer(AttentionLayerBase):
    """An attention layer as the builder looks at it."""

    def __init__(self, **impl) -> None:
        self.impl = SimpleNamespace(**impl)
        self.num_heads = 4
        self.attn_type = "decoder"
        self.kv_cache_dtype = "fp8"

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


def make_spec(**changes) -> FullAttentionSpec:
    values = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.uint8,
        "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
    }
    return FullAttentionSpec(**values | changes)


def make_config(layers=None, *, speculative=0, parallel_drafting=False, **cache):
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, rswa_window=None),
        cache_config=SimpleNamespace(**{"cache_dtype": "fp8"} | cache),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=parallel_drafting)
        if speculative
        else None,
        compilation_config=SimpleNamespace(static_forward_context={"layers.0": Layer()} if layers is None else layers),
    )


def make(layers=None, spec=None, cls=Builder, **config):
    config = make_config(layers, **config)
    names = list(config.compilation_config.static_forward_context)
    return cls(spec or make_spec(), names, config, torch.device("cpu"))


def cam(query_lens, *, prefilling=None, max_query_len=None, **changes) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    values = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor([20 + length if length else 0 for length in query_lens], dtype=torch.int32),
        "num_reqs": len(query_lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(query_lens) if max_query_len is None else max_query_len,
        "max_seq_len": 64,
        "block_table_tensor": torch.arange(len(query_lens) * 4, dtype=torch.int32).view(len(query_lens), 4),
        "slot_mapping": torch.arange(int(starts[-1])),
        "is_prefilling": None if prefilling is None else torch.tensor(prefilling),
    }
    return CommonAttentionMetadata(**values | changes)


def counted() -> dict[str, int]:
    counters = read(telemetry.process_counters().path).counters
    return {name: number for name, number in counters.items() if number}


def draft_layer() -> Layer:
    layer = Layer()
    layer.is_draft_layer = True
    return layer


def promising(support: AttentionCGSupport) -> type:
    """Our builder over a fallback that promises ``support``."""
    base = type("Base", (TorchReferenceBackend.get_builder_cls(),), {"_cudagraph_support": support})
    return type("Composed", (BuilderMixin, base), {"fallback_name": "BASE"})
