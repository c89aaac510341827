"""Static eligibility: one row a rule, in the order in which the rules apply."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from mjolnir import eligibility
from mjolnir.eligibility import ineligible_reason
from mjolnir.env import BackendSettings


class Group:
    """An attention group that T5 can run, as plain objects; a test spoils one thing of it."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(
            head_size=128,
            head_size_v=128,
            dtype=torch.uint8,
            kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR"),
            block_size=16,
            sliding_window=None,
            attention_chunk_size=None,
            tokens_per_state=1,
            num_head_slots=None,
            state_content_bytes=None,
        )
        self.impl = SimpleNamespace(sliding_window=None, logits_soft_cap=None, sinks=None, alibi_slopes=None)
        self.layer = SimpleNamespace(impl=self.impl, attn_type="decoder", kv_cache_dtype="fp8")
        self.layers = {"model.layers.0.attn": self.layer}
        self.config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype="fp8"),
            model_config=SimpleNamespace(dtype=torch.bfloat16, rswa_window=None),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        )
        self.device_type = "cpu"
        self.settings = {}

    def reason(self) -> str | None:
        settings = BackendSettings(**self.settings)
        return ineligible_reason(self.spec, self.layers, self.config, self.device_type, settings)


def spoil_quant_mode(group: Group) -> None:
    group.spec.kv_quant_mode = SimpleNamespace(name="FP8_PER_TOKEN_HEAD")


def spoil_layers(group: Group) -> None:
    group.layers = None


# In the order of the rules: what spoils a group, and the whole reason.
RULES = [
    ("disabled", lambda g: g.settings.update(disabled=True), "MJOLNIR_ATTN_DISABLE set"),
    (
        "cache dtype",
        lambda g: setattr(g.config.cache_config, "cache_dtype", "auto"),
        "kv cache dtype 'auto' is not one of fp8, fp8_e4m3, fp6_e2m3",
    ),
    ("quant mode", spoil_quant_mode, "kv cache dtype of this group is fp8_per_token_head, not fp8 per tensor"),
    ("head size", lambda g: setattr(g.spec, "head_size", 96), "head_size 96 is not one of 64, 128, 256"),
    ("V head size", lambda g: setattr(g.spec, "head_size_v", 64), "K/V head sizes differ (128 and 64)"),
    ("window", lambda g: setattr(g.spec, "sliding_window", 4096), "sliding-window KV spec (4096 tokens)"),
    ("chunk", lambda g: setattr(g.spec, "attention_chunk_size", 8192), "chunked local attention (8192 tokens)"),
    ("block size", lambda g: setattr(g.spec, "block_size", 48), "block size 48 is not one of 16, 32, 64, 128"),
    (
        "cells",
        lambda g: setattr(g.spec, "state_content_bytes", 192),
        "KV cells are not one K and one V row per token and head",
    ),
    (
        "model dtype",
        lambda g: setattr(g.config.model_config, "dtype", torch.float32),
        "model dtype float32 is not one of bfloat16, float16",
    ),
    (
        "decode context parallel",
        lambda g: setattr(g.config.parallel_config, "decode_context_parallel_size", 2),
        "decode context parallel size 2",
    ),
    (
        "prefill context parallel",
        lambda g: setattr(g.config.parallel_config, "prefill_context_parallel_size", 4),
        "prefill context parallel size 4",
    ),
    (
        "R-SWA",
        lambda g: setattr(g.config.model_config, "rswa_window", 512),
        "reference sliding window attention (512 tokens)",
    ),
    ("device", lambda g: setattr(g, "device_type", "xpu"), "no T5 kernels for device type 'xpu' in this build"),
    ("no layers", spoil_layers, "the layers of this group could not be looked up in this vLLM"),
]

# Rules of one layer, in their order.
LAYER_RULES = [
    ("sliding window", lambda g: setattr(g.impl, "sliding_window", (4095, 0)), "sliding window"),
    ("soft-cap", lambda g: setattr(g.impl, "logits_soft_cap", 30.0), "logits soft-cap"),
    ("sinks", lambda g: setattr(g.impl, "sinks", torch.zeros(4)), "attention sinks"),
    ("ALiBi", lambda g: setattr(g.impl, "alibi_slopes", torch.ones(4)), "ALiBi"),
    ("cross", lambda g: setattr(g.layer, "attn_type", "encoder_decoder"), "attention type encoder_decoder"),
    ("layer dtype", lambda g: setattr(g.layer, "kv_cache_dtype", "auto"), "kv cache dtype 'auto'"),
    ("ALiBi root", lambda g: setattr(g.layer, "use_alibi_sqrt", True), "ALiBi (square root)"),
    (
        "prefix mask",
        lambda g: setattr(g.layer, "mm_prefix_clamp_sliding_window", True),
        "a mask of its own (multimodal prefix or chunked look-back)",
    ),
]
IN_LAYER = "layer model.layers.0.attn: "


def test_a_plain_fp8_group_is_eligible():
    assert Group().reason() is None


@pytest.mark.parametrize(("spoil", "reason"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_rule(spoil, reason):
    group = Group()
    spoil(group)
    assert group.reason() == reason


@pytest.mark.parametrize("first", range(len(RULES)), ids=[rule[0] for rule in RULES])
def test_first_rule_gives_the_reason(first):
    """With every later rule broken too, the layers' included."""
    group = Group()
    for _, spoil, _ in RULES[first:] + LAYER_RULES:
        spoil(group)
    assert group.reason() == RULES[first][2]


@pytest.mark.parametrize(("spoil", "reason"), [rule[1:] for rule in LAYER_RULES], ids=[rule[0] for rule in LAYER_RULES])
def test_layer_rule(spoil, reason):
    group = Group()
    spoil(group)
    assert group.reason() == IN_LAYER + reason


@pytest.mark.parametrize("first", range(len(LAYER_RULES)), ids=[rule[0] for rule in LAYER_RULES])
def test_first_layer_rule_gives_the_reason(first):
    group = Group()
    for _, spoil, _ in LAYER_RULES[first:]:
        spoil(group)
    assert group.reason() == IN_LAYER + LAYER_RULES[first][2]


def test_one_odd_layer_spoils_the_group_and_is_named():
    group, odd = Group(), Group()
    odd.impl.logits_soft_cap = 50.0
    group.layers = {"layers.2": odd.layer, "layers.0": group.layer, "layers.1": odd.layer}
    assert group.reason() == "layer layers.1: logits soft-cap"


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3"])
def test_all_shapes_that_t5_takes(head_size, block_size, dtype, cache_dtype):
    group = Group()
    group.spec.head_size = group.spec.head_size_v = head_size
    group.spec.block_size = block_size
    group.config.model_config.dtype = dtype
    group.config.cache_config.cache_dtype = group.layer.kv_cache_dtype = cache_dtype
    assert group.reason() is None


@pytest.mark.parametrize("head_size", [None, 0, 32, 80, 96, 112, 192, 384, 512])
def test_other_head_sizes(head_size):
    group = Group()
    group.spec.head_size = group.spec.head_size_v = head_size
    assert group.reason() == f"head_size {head_size} is not one of 64, 128, 256"


@pytest.mark.parametrize("block_size", [1, 8, 24, 256, 544])
def test_other_block_sizes(block_size):
    group = Group()
    group.spec.block_size = block_size
    assert group.reason() == f"block size {block_size} is not one of 16, 32, 64, 128"


@pytest.mark.parametrize(
    "dtype", ["auto", "bfloat16", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4"]
)
def test_other_cache_dtypes(dtype):
    """``fp8_e5m2`` and ``fp8_per_token_head`` begin as ours do: a test of the prefix would take them."""
    group = Group()
    group.config.cache_config.cache_dtype = dtype
    assert group.reason() == f"kv cache dtype '{dtype}' is not one of fp8, fp8_e4m3, fp6_e2m3"


@pytest.mark.parametrize("window", [None, -1, (-1, -1), [-1, -1]])
def test_spellings_of_no_window(window):
    group = Group()
    group.impl.sliding_window = window
    assert group.reason() is None


@pytest.mark.parametrize("window", [1, 4096, (4095, 0), [4095, 0], (-1, 0)])
def test_spellings_of_a_window(window):
    group = Group()
    group.impl.sliding_window = window
    assert group.reason() == IN_LAYER + "sliding window"


@pytest.mark.parametrize("soft_cap", [None, 0, 0.0])
def test_no_soft_cap(soft_cap):
    group = Group()
    group.impl.logits_soft_cap = soft_cap
    assert group.reason() is None


@pytest.mark.parametrize("lookback", [0, 3])
def test_chunked_look_back(lookback):
    group = Group()
    group.impl.chunk_lookback = lookback
    assert group.reason() == IN_LAYER + "a mask of its own (multimodal prefix or chunked look-back)"
    group.impl.chunk_lookback = -1
    assert group.reason() is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens_per_state", 4), ("tokens_per_state", Fraction(1, 4)), ("num_head_slots", 1), ("state_content_bytes", 96)],
)
def test_packed_cells(field, value):
    group = Group()
    setattr(group.spec, field, value)
    assert group.reason() == "KV cells are not one K and one V row per token and head"


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_attention_types(attn_type):
    group = Group()
    group.layer.attn_type = attn_type
    assert group.reason() == IN_LAYER + f"attention type {attn_type}"
    group.layer.attn_type = SimpleNamespace(value=attn_type)  # as an enum member
    assert group.reason() == IN_LAYER + f"attention type {attn_type}"


def test_an_impl_without_the_attributes_has_none_of_the_features():
    group = Group()
    group.layer.impl = SimpleNamespace()
    assert group.reason() is None


def test_layer_that_shares_another_ones_cache_is_eligible():
    """It reads with its own scales, which the plain per-tensor format has."""
    group = Group()
    group.impl.kv_sharing_target_layer_name = "model.layers.0.attn"
    assert group.reason() is None


# vLLM's own objects.


def real_spec(**changes):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    values = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.uint8,
        "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
    }
    return FullAttentionSpec(**values | changes)


def test_real_fp8_spec_is_eligible():
    group = Group()
    group.spec = real_spec()
    assert group.reason() is None


def test_real_quant_modes_but_one_are_refused():
    from vllm.v1.kv_cache_interface import KVQuantMode

    group, taken = Group(), []
    for mode in KVQuantMode:
        group.spec = real_spec(kv_quant_mode=mode)
        if group.reason() is None:
            taken.append(mode.name)
        else:
            assert group.reason() == f"kv cache dtype of this group is {mode.name.lower()}, not fp8 per tensor"
    assert taken == ["FP8_PER_TENSOR"]


def test_group_that_skips_the_cache_quantisation_is_refused():
    """--kv-cache-dtype-skip-layers: the global dtype says fp8, this group's pages hold bf16."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    group = Group()
    group.spec = real_spec(dtype=torch.bfloat16, kv_quant_mode=KVQuantMode.NONE)
    assert group.reason() == "kv cache dtype of this group is none, not fp8 per tensor"
    group.spec = real_spec(dtype=torch.bfloat16)
    assert group.reason() == "kv cache dtype of this group is fp8_per_tensor, not fp8 per tensor"


def test_our_cache_dtypes_have_vllms_modes():
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    modes = {name: get_kv_quant_mode(name).name for name in eligibility.T5_KV_DTYPES}
    assert modes == {"fp8": "FP8_PER_TENSOR", "fp8_e4m3": "FP8_PER_TENSOR", "fp6_e2m3": "FP6_E2M3"}


def packed_group(head_size=128, **changes):
    from vllm.v1.kv_cache_interface import KVQuantMode

    group = Group()
    group.config.cache_config.cache_dtype = group.layer.kv_cache_dtype = "fp6_e2m3"
    values = {
        "head_size": head_size,
        "head_size_v": head_size,
        "kv_quant_mode": KVQuantMode.FP6_E2M3,
        "state_content_bytes": 2 * head_size * 6 // 8,
    }
    for name, value in (values | changes).items():
        setattr(group.spec, name, value)
    return group


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [64, 128, 256]), ("cuda", [128, 256])])
def test_packed_pages_by_device(device, sizes):
    """The CUDA kernel reads rows in vectors of 16 bytes, which those of 48 are not."""
    reasons = {}
    for size in (64, 128, 256):
        group = packed_group(size)
        group.device_type = device
        reasons[size] = group.reason()
    refused = f"head_size 64 with fp6_e2m3 on {device} is not one of 128, 256"
    assert reasons == {size: None if size in sizes else refused for size in (64, 128, 256)}


def test_packed_pages_of_another_size_are_not_ours():
    assert packed_group(state_content_bytes=None).reason() == (
        "KV cells are not one K and one V row per token and head"
    )
    from vllm.v1.kv_cache_interface import KVQuantMode

    group = packed_group(kv_quant_mode=KVQuantMode.NONE)  # a layer that was told to skip the format
    assert group.reason() == "kv cache dtype of this group is none, not fp6_e2m3"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 1024}, "sliding-window KV spec (1024 tokens)"),
        ({"attention_chunk_size": 8192}, "chunked local attention (8192 tokens)"),
        ({"head_size_v": 128}, "K/V head sizes differ (64 and 128)"),
        ({"tokens_per_state": 4}, "KV cells are not one K and one V row per token and head"),
        ({"state_content_bytes": 96}, "KV cells are not one K and one V row per token and head"),
        ({"num_head_slots": 1}, "KV cells are not one K and one V row per token and head"),
    ],
)
def test_real_spec_fields_are_named_as_the_rules_read_them(changes, reason):
    group = Group()
    group.spec = real_spec(**changes)
    assert group.reason() == reason


def test_real_sliding_window_spec_is_refused():
    from vllm.v1.kv_cache_interface import KVQuantMode, SlidingWindowSpec

    group = Group()
    group.spec = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        sliding_window=512,
    )
    assert group.reason() == "sliding-window KV spec (512 tokens)"


def test_real_attention_types():
    from vllm.v1.attention.backend import AttentionType

    group = Group()
    group.layer.attn_type = AttentionType.DECODER
    assert group.reason() is None
    group.layer.attn_type = AttentionType.ENCODER_DECODER
    assert group.reason() == IN_LAYER + "attention type encoder_decoder"
