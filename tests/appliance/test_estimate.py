"""`mjolnir estimate`: figures worked out by hand and published ones, per model; tests/engine asks vLLM itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ModelError, SettingsError
from appliance.estimate import pages
from appliance.estimate.config import ModelConfig, load
from appliance.estimate.estimate import (
    GIB,
    PACKED_HEAD_SIZES,
    Estimate,
    FormatEstimate,
    Load,
    Machine,
    estimate,
    parse_size,
)
from appliance.estimate.layers import Attention, State
from appliance.estimate.tensors import language_model, vision_tower
from appliance.estimate.weights import weigh
from mjolnir.runner import HEAD_SIZES
from tests.appliance import published_models as published

MIB = 2**20


def folder(tmp_path: Path, config: dict[str, Any] | str) -> str:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


def read(tmp_path: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    changed = {name: value for name, value in {**config, **changes}.items() if value != "absent"}
    return load(folder(tmp_path, changed))


def by_format(found: Estimate) -> dict[str, FormatEstimate]:
    return {each.format: each for each in found.formats}


# Parameters as counted by the models' publishers (model cards and papers), or by the tensors of their files.
@pytest.mark.parametrize(
    ("name", "language", "whole"),
    [
        ("QWEN3_8B", 8_190_735_360, 8_190_735_360),
        ("LLAMA_31_8B", 8_030_261_248, 8_030_261_248),
        ("SMOLLM2_135M", 134_515_008, 134_515_008),
        ("QWEN25_05B", 494_032_768, 494_032_768),
        ("GEMMA3_1B", 999_885_952, 999_885_952),
        ("GEMMA3_4B", 3_880_263_168, 4_300_079_472),
        ("GPT_OSS_20B", 20_914_757_184, 20_914_757_184),
        ("DEEPSEEK_V2_LITE", 15_706_484_224, 15_706_484_224),
        ("DEEPSEEK_V3", 671_026_419_200, 671_026_419_200),
        ("QWEN3_NEXT_80B", 79_674_391_296, 79_674_391_296),
        ("QWEN3_30B_A3B", 30_532_122_624, 30_532_122_624),
        ("MIXTRAL_8X7B", 46_702_792_704, 46_702_792_704),
        ("MISTRAL_7B", 7_241_732_096, 7_241_732_096),
        ("QWEN35_27B", 26_895_998_464, 27_356_728_560),
        ("NEMOTRON_NANO_9B_V2", 8_888_227_328, 8_888_227_328),
    ],
)
def test_counts_parameters(tmp_path: Path, name: str, language: int, whole: int) -> None:
    config = read(tmp_path, published.ALL[name])
    counted = sum(tensor.elements for tensor in language_model(config))
    assert counted == language
    tower = vision_tower(config)
    assert tower is not None
    assert counted + tower == pytest.approx(whole, rel=1e-4)


NO_6_BITS = {
    "DEEPSEEK_V2_LITE": "MLA's latent vectors have no 6-bit form",
    "DEEPSEEK_V3": "MLA's latent vectors have no 6-bit form",
    "GEMMA4_SHAPE": "head size 512; accepted: 64, 128, 256",
}


# (layers x KV heads x (K + V) x bytes): tokens' bytes in bf16, of the windows' layers in bf16, of a sequence's states.
@pytest.mark.parametrize(
    ("name", "token", "window", "states"),
    [
        ("QWEN3_8B", 36 * 8 * 256 * 2, 0, 0),
        ("LLAMA_31_8B", 32 * 8 * 256 * 2, 0, 0),
        ("SMOLLM2_135M", 30 * 3 * 128 * 2, 0, 0),
        ("QWEN25_05B", 24 * 2 * 128 * 2, 0, 0),  # its window is switched off
        ("GEMMA3_4B", 5 * 4 * 512 * 2, 29 * 4 * 512 * 2, 0),
        ("GEMMA3_1B", 4 * 1 * 512 * 2, 22 * 1 * 512 * 2, 0),
        ("GPT_OSS_20B", 12 * 8 * 128 * 2, 12 * 8 * 128 * 2, 0),
        ("MISTRAL_7B", 0, 32 * 8 * 256 * 2, 0),
        ("MIXTRAL_8X7B", 32 * 8 * 256 * 2, 0, 0),
        ("DEEPSEEK_V2_LITE", 27 * (512 + 64) * 2, 0, 0),  # one latent vector and one rotated key for all heads
        ("DEEPSEEK_V3", 61 * (512 + 64) * 2, 0, 0),
        # 36 delta nets: a convolution over 8192 channels of 4 tokens, 32 heads of 128 x 128, in bf16
        ("QWEN3_NEXT_80B", 12 * 2 * 512 * 2, 0, 36 * (3 * 8192 + 32 * 128 * 128) * 2),
        # 48 of them, the recurrent state in float32
        ("QWEN35_27B", 16 * 4 * 512 * 2, 0, 48 * (3 * 10240 * 2 + 48 * 128 * 128 * 4)),
        # 27 Mamba-2 layers, 128 heads of 80 x 128 in float32, convolution over 12288 channels of 4 tokens
        ("NEMOTRON_NANO_9B_V2", 4 * 8 * 256 * 2, 0, 27 * (3 * 12288 * 2 + 128 * 80 * 128 * 4)),
        # 8 layers with KV of their own, 4 that read theirs: one global of 512, seven sliding ones of 256
        ("GEMMA4_SHAPE", 1 * 1 * 1024 * 2, 7 * 1 * 512 * 2, 0),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, name: str, token: int, window: int, states: int) -> None:
    found = by_format(estimate(read(tmp_path, published.ALL[name]), Machine(2048 * GIB), Load()))
    for kv_format, eighths in (("auto", 8), ("fp8", 4), ("fp6_e2m3", 3)):
        each = found[kv_format]
        if kv_format == "fp6_e2m3" and name in NO_6_BITS:
            assert each.problem == NO_6_BITS[name]
            continue
        assert each.problem == ""
        assert (each.token_bytes, each.window_token_bytes) == (token * eighths // 8, window * eighths // 8)
        assert each.state_bytes == states


def test_tokens_that_fit(tmp_path: Path) -> None:
    """Blocks of 128 tokens x 30 layers x 3 heads x 128 numbers in 1 GiB; vLLM's log says the same three."""
    machine = Machine(8 * GIB, gpu=False, kv_cache=GIB)
    found = by_format(estimate(read(tmp_path, published.SMOLLM2_135M), machine, Load()))
    assert {name: each.tokens for name, each in found.items()} == {
        "auto": GIB // (128 * 23040) * 128,
        "fp8": GIB // (128 * 11520) * 128,
        "fp6_e2m3": GIB // (128 * 8640) * 128,
    }
    assert found["fp6_e2m3"].tokens == 124_160
    assert found["fp8"].block_bytes == 30 * 49_152


def test_the_scratch_of_packed_pages_is_taken_off_the_cache(tmp_path: Path) -> None:
    """One layer's K and V of 65,536 tokens in 16 bits, or of a longer context; a cache that was asked for stays."""
    config, tokens = read(tmp_path, published.QWEN3_8B), 8 * 256 * 2
    left = estimate(config, Machine(122 * GIB), Load())
    fp6 = by_format(left)["fp6_e2m3"]
    assert fp6.scratch_bytes == 65_536 * tokens
    assert fp6.tokens == (left.kv_cache - 65_536 * tokens) // (16 * 55_296) * 16
    asked = by_format(estimate(config, Machine(122 * GIB, kv_cache=GIB), Load(max_model_len=131_072)))["fp6_e2m3"]
    assert asked.scratch_bytes == 131_200 * tokens
    assert asked.tokens == GIB // (16 * 55_296) * 16
    assert by_format(left)["fp8"].scratch_bytes == 0


def test_head_sizes_are_those_of_the_backend() -> None:
    assert PACKED_HEAD_SIZES == HEAD_SIZES


def test_longest_context_of_several_sequences(tmp_path: Path) -> None:
    """728 blocks of 128 tokens, one of which is vLLM's null block; three sequences have 242 of them each."""
    machine = Machine(8 * GIB, gpu=False, kv_cache=GIB)
    config = read(tmp_path, published.SMOLLM2_135M)
    found = by_format(estimate(config, machine, Load(sequences=3, max_model_len=40_000)))
    assert found["fp8"].longest == 727 // 3 * 128
    assert found["fp8"].fits
    assert by_format(estimate(config, machine, Load(sequences=728)))["fp8"].longest == 0


def test_a_context_that_does_not_fit(tmp_path: Path) -> None:
    """Then the tokens are those of the longest context that does, and `fits` is false: vLLM would refuse to start."""
    machine = Machine(8 * GIB, gpu=False, kv_cache=GIB)
    found = by_format(estimate(read(tmp_path, published.LLAMA_31_8B), machine, Load()))["auto"]
    assert not found.fits
    assert found.longest == found.context == (64 - 1) * 128
    assert found.tokens == 64 * 128


def test_room_for_the_cache(tmp_path: Path) -> None:
    machine = Machine(100 * GIB, utilisation=0.9, reserve=3 * GIB)
    found = estimate(read(tmp_path, published.GEMMA3_4B), machine, Load())
    assert found.weights.margin == round(found.weights.vision_parameters * 2 * 0.1) > 0
    assert found.kv_cache == 90 * GIB - found.weights.size - found.weights.margin - 3 * GIB


def test_windows_hold_what_is_in_flight(tmp_path: Path) -> None:
    """A window of 4096 and two steps of 8192 tokens: 20,479 tokens in pages of 16, and one page more."""
    config = read(tmp_path, published.MISTRAL_7B)
    found = by_format(estimate(config, Machine(122 * GIB, kv_cache=40 * GIB), Load()))["fp8"]
    blocks = 40 * GIB // (16 * 32 * 8 * 256)
    assert found.tokens == int(blocks / (20_479 // 16 + 1 + 1) * 32768)


def test_pages_of_two_sizes_become_equal() -> None:
    """A wide layer's page of 16 tokens is 64 KiB; a narrow one's takes 32 tokens to be as large."""
    paging = pages.Paging("auto", 16, 1024)
    narrow, wide = Attention(4, 128, 128, window=256), Attention(2, 512, 512)
    plan = pages.plan([narrow, narrow, wide, None, Attention(2, 512, 512, shared=True)], paging)
    assert [(group.page.tokens, group.layers) for group in plan.groups] == [(32, 1), (32, 1), (16, 1)]
    assert plan.block_bytes == 64 * 1024
    assert plan.blocks_of(4096) == 2 * (1279 // 32 + 1 + 1) + 4096 // 16


def test_pages_that_no_length_makes_equal_are_padded() -> None:
    paging = pages.Paging("auto", 16, 1024)
    plan = pages.plan([Attention(3, 64, 64, window=256), Attention(4, 64, 64)], paging)
    assert plan.block_bytes == 16 * 4 * 128 * 2
    assert [group.page.tokens for group in plan.groups] == [16, 16]


def test_a_page_is_as_long_as_a_state_needs() -> None:
    """A state of 1 MiB beside 1 KiB a token: pages of 1024 tokens, each sequence has two of the state's."""
    paging = pages.Paging("auto", 16, 1024)
    plan = pages.plan([State(2**18, 2**18)] * 3 + [Attention(2, 128, 128)], paging)
    assert [(group.page.kind, group.page.tokens, group.layers) for group in plan.groups] == [
        ("state", 1024, 1),
        ("state", 1024, 1),
        ("state", 1024, 1),
        ("full", 1024, 1),
    ]
    assert plan.block_bytes == MIB
    assert plan.blocks_of(2049) == 3 * 2 + 3


def test_rows_that_six_bits_do_not_fill() -> None:
    with pytest.raises(ModelError, match="head size 66 can't be packed in fp6_e2m3; accepted: multiples of 4"):
        pages.row_bytes(66, "fp6_e2m3")


LINEAR = 6_945_767_424  # numbers of Qwen3-8B in linear layers of its 36 layers: neither embedding, head nor norms
REST = 8_190_735_360 - LINEAR
# Bytes of one scale each: output channels and matrices of a layer.
CHANNELS = 36 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)


@pytest.mark.parametrize(
    ("quantisation", "expected", "name"),
    [
        ({"quant_method": "fp8"}, LINEAR + 36 * 7 * 4, "FP8"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            LINEAR + LINEAR // 128**2 * 4,
            "FP8, blocks of 128x128",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, LINEAR * 9 // 16, "NVFP4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, None, "GPTQ, 4 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, int(LINEAR * (0.5 + 2.5 / 128)), "AWQ, 4 bits"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                    }
                },
            },
            LINEAR + CHANNELS * 2,
            "FP8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
                },
            },
            LINEAR // 2 + LINEAR // 128 * 2,
            "INT4, groups of 128",
        ),
    ],
)
def test_quantised_weights(tmp_path: Path, quantisation: dict[str, Any], expected: int | None, name: str) -> None:
    found = weigh(read(tmp_path, published.QWEN3_8B, quantization_config=quantisation))
    if expected is None:  # GPTQ also stores the group of every input feature
        inputs = 36 * (4 * 4096 + 2 * 4096 + 12288)
        expected = int(LINEAR * (0.5 + 2.5 / 128)) + 4 * inputs
    assert found.size == expected + 2 * REST
    assert found.format == name
    assert found.parameters == 8_190_735_360


@pytest.mark.parametrize(
    ("ignored", "left_out"),
    [
        ("model.layers.0.self_attn", 4096 * (2 * 4096 + 2 * 1024)),
        ("model.layers.*.self_attn*", 36 * 4096 * (2 * 4096 + 2 * 1024)),
        ("re:.*down_proj", 36 * 4096 * 12288),
        ("model.layers.1", LINEAR // 36),  # and not layers 10 to 19
    ],
)
def test_what_a_recipe_leaves_out(tmp_path: Path, ignored: str, left_out: int) -> None:
    recipe = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [ignored]}
    found = weigh(read(tmp_path, published.QWEN3_8B, quantization_config=recipe))
    assert found.size == (LINEAR - left_out) * 9 // 16 + 2 * (REST + left_out)


def test_mxfp4_is_as_large_as_the_published_files(tmp_path: Path) -> None:
    """gpt-oss-20b's three safetensors files hold 13,761,264,768 bytes."""
    assert weigh(read(tmp_path, published.GPT_OSS_20B)).size == pytest.approx(13_761_264_768, rel=1e-3)


def test_files_beside_it_win(tmp_path: Path) -> None:
    config = read(tmp_path, published.QWEN3_8B, quantization_config={"quant_method": "homemade"})
    with pytest.raises(ModelError, match="quant_method is 'homemade'; known: fp8, modelopt"):
        weigh(config)
    index = {"metadata": {"total_size": 6_000_000_000}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = weigh(config)
    assert (found.size, found.source, found.format) == (6_000_000_000, "safetensors index", "quantised")
    (tmp_path / "one.safetensors").write_bytes(bytes(300))
    assert weigh(config).source == "safetensors index"
    (tmp_path / "two.safetensors").write_bytes(bytes(45))
    found = weigh(config)
    assert (found.size, found.margin, found.source) == (345, 0, "safetensors files")


def test_modelopts_own_file(tmp_path: Path) -> None:
    config = read(tmp_path, published.QWEN3_8B)
    recipe = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(recipe))
    assert weigh(config).size == LINEAR * 9 // 16 + 2 * REST


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "warp_drive"}, "model_type 'warp_drive' can't be estimated, because which layers it has"),
        ({"model_type": "absent"}, "model_type is missing; needed: the kind of the model"),
        ({"hidden_size": "absent"}, "hidden_size is missing; needed: a whole number above 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3; accepted: a whole number above 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; accepted: a whole number above 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; accepted"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
        ({"head_dim": None, "num_attention_heads": 24}, "hidden_size 4096 is no multiple of num_attention_heads 24"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 36"),
        ({"layer_types": ["telepathy"] * 36}, "can't estimate a layer of type 'telepathy'; known: full_attention"),
        ({"torch_dtype": "int3"}, "torch_dtype is 'int3'; accepted: bfloat16, float16, float32"),
        ({"rope_scaling": {"type": "linear", "factor": "big"}}, "factor is 'big'; accepted: 1 or more"),
        ({"quantization_config": 4}, "quantization_config is 4; accepted: an object"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 5}},
            "bits 5, group_size 128; accepted: 2, 3, 4 or 8 bits",
        ),
    ],
)
def test_a_configuration_that_makes_no_sense(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        estimate(read(tmp_path, published.QWEN3_8B, **changes), Machine(122 * GIB), Load())
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "load_", "message"),
    [
        (Machine(GIB, utilisation=1.2), Load(), "--utilisation=1.2: accepted: above 0, at most 1"),
        (Machine(GIB, utilisation=float("nan")), Load(), "--utilisation=nan"),
        (Machine(GIB, kv_cache=0), Load(), "--kv-cache-gib=0.0: accepted: a number above 0"),
        (Machine(GIB), Load(sequences=0), "--sequences=0: accepted: a whole number above 0"),
        (Machine(GIB), Load(max_model_len=-1), "--max-model-len=-1: accepted: a whole number above 0"),
        (Machine(GIB), Load(block_size=48), "--block-size=48: accepted: 16, 32, 64, 128"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path: Path, machine: Machine, load_: Load, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        estimate(read(tmp_path, published.QWEN3_8B), machine, load_)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "size"), [("122GiB", 122 * GIB), ("64 GB", 64 * 10**9), ("1.5gib", 3 * GIB // 2), ("4096", 4096)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "lots", "-4GiB", "0", "12 parsecs", "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match="accepted: a number above 0 and a unit, such as 122GiB or 64GB"):
        parse_size(text, "--memory")


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, 40960),
        ({"type": "linear", "factor": 2.0}, 81920),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ],
)
def test_the_models_own_limit(tmp_path: Path, scaling: dict[str, Any], limit: int) -> None:
    config = read(tmp_path, published.QWEN3_8B, rope_scaling=scaling)
    assert estimate(config, Machine(122 * GIB), Load()).limit == limit
