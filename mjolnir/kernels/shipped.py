"""The kernels of the shapes that we publish, as variants: what the documentation's table and the build tests compile.

Shapes are those of the benchmarks, on vLLM's head-major cache with a token's K and V side by side.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from mjolnir.kernels.compiler import KernelVariant
from mjolnir.kernels.store import QUADS, WARPS, expand_kernel, write_kernel
from mjolnir.kernels.variants import Choice, Shape, Strides, decode_variant, merge_variant, shape_of
from mjolnir.reference import e2m3
from mjolnir.runner import RunnerConfig

SMS = {90: 132, 110: 20}  # H200; Thor
BATCHES = (1, 64)  # who merges depends on the batch
MAX_NUM_SEQS = 256
WORD = 4  # bytes
MODELS = ((32, 8, 128), (24, 4, 256), (64, 8, 128), (9, 3, 64))  # query heads, KV heads, head size
# (KV format, query tokens, page sizes)
STEPS = (("fp8", 1, (16, 128)), ("fp8", 2, (16,)), ("fp8", 4, (16, 128)), ("e2m3", 1, (16, 128)), ("e2m3", 4, (16,)))
PACKED_HEAD_SIZES = (128, 256)


class ShippedVariant(NamedTuple):
    """A variant, and what it was made of.

    Attributes:
        variant: to compile.
        shape: that of its launch; None for the kernels that fill and expand a cache.
    """

    variant: KernelVariant
    shape: Shape | None


def shipped_variants(arch: int) -> list[KernelVariant]:
    """Every variant for a compute capability, 90 or 110: decode, merge and the packed cache's own, each once."""
    return [each.variant for each in shipped(arch)]


def shipped(arch: int) -> list[ShippedVariant]:
    """As `shipped_variants`, with the shapes."""
    found: dict[KernelVariant, ShippedVariant] = {}
    for each in (*_decode_variants(arch), *_store_variants()):
        # Merging knows neither pages nor, for one query token, the mask: the first label stands for all.
        found.setdefault(dataclasses.replace(each.variant, label=""), each)
    return list(found.values())


def _decode_variants(arch: int) -> Iterator[ShippedVariant]:
    for num_heads, num_kv_heads, head_size in MODELS:
        for kv_format, q_len, page_sizes in STEPS:
            if kv_format == "e2m3" and head_size not in PACKED_HEAD_SIZES:
                continue
            for page_size in page_sizes:
                config = _config(num_heads, num_kv_heads, head_size, page_size, q_len, kv_format)
                shape = shape_of(config, q_len, SMS[arch], f"sm_{arch}")
                for merge_here in sorted({shape.merge_here(batch) for batch in BATCHES}):
                    choice = _choice(config, q_len, merge_here)
                    yield ShippedVariant(decode_variant(shape, choice), shape)
                    if not merge_here:
                        yield ShippedVariant(merge_variant(shape, choice), shape)


def _config(heads: int, kv_heads: int, head_size: int, page_size: int, q_len: int, kv_format: str) -> RunnerConfig:
    return RunnerConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        page_size=page_size,
        out_dtype=torch.bfloat16,
        max_num_seqs=MAX_NUM_SEQS,
        device=torch.device("cuda"),
        max_q_len=q_len,
        q_dtype="bf16",
        kv_format=kv_format,
    )


def _choice(config: RunnerConfig, q_len: int, merge_here: bool) -> Choice:
    token, head = config.num_heads * config.head_size, config.head_size
    page_words, head_words, token_words = (stride // WORD for stride in _cache_strides(config))
    return Choice(
        q_len=q_len,
        causal=True,
        merge_here=merge_here,
        write_lse=False,
        channel_scales=config.kv_format == "e2m3",
        q_dtype=torch.bfloat16,
        strides=Strides(token, head, token, head, page_words, head_words, token_words),
    )


def _cache_strides(config: RunnerConfig) -> tuple[int, int, int]:
    """Bytes from page to page, head to head and token to token."""
    row = e2m3.row_bytes(config.head_size) if config.kv_format == "e2m3" else config.head_size
    return config.num_kv_heads * config.page_size * 2 * row, config.page_size * 2 * row, 2 * row


def _store_variants() -> Iterator[ShippedVariant]:
    """What fills and expands packed caches, with scales by channel."""
    for num_heads, num_kv_heads, head_size in MODELS:
        if head_size in PACKED_HEAD_SIZES:
            config = _config(num_heads, num_kv_heads, head_size, 16, 1, "e2m3")
            yield ShippedVariant(_write_variant(config), None)
            yield ShippedVariant(_expand_variant(config), None)


def _write_variant(config: RunnerConfig) -> KernelVariant:
    """`mjolnir.kernels.store.write_kernel` for K and V of a fused QKV."""
    head_size, heads = config.head_size, config.num_kv_heads
    fused = (config.num_heads + 2 * heads) * head_size
    arguments = {
        "KEY": "*bf16",
        "VALUE": "*bf16",
        "K": "*u8",
        "V": "*u8",
        "SLOT_MAPPING": "*i64",
        "K_SCALE": "*fp32",
        "V_SCALE": "*fp32",
        "tokens": "i32",
        "num_slots": "i32",
    }
    constants = {
        "KEY_TOKEN_STRIDE": fused,
        "KEY_HEAD_STRIDE": head_size,
        "VALUE_TOKEN_STRIDE": fused,
        "VALUE_HEAD_STRIDE": head_size,
        "K_SCALE_HEAD_STRIDE": head_size,
        "K_SCALE_CHANNEL_STRIDE": 1,
        "V_SCALE_HEAD_STRIDE": head_size,
        "V_SCALE_CHANNEL_STRIDE": 1,
        **_cache_shape(config),
    }
    return KernelVariant(
        write_kernel,
        tuple(arguments.items()),
        tuple(constants.items()),
        label=f"write {_cache_label(config)}",
        aligned=("KEY", "VALUE", "K", "V"),
        num_warps=WARPS,
    )


def _expand_variant(config: RunnerConfig) -> KernelVariant:
    """`mjolnir.kernels.store.expand_kernel` with ratios by channel."""
    head_size, heads, page = config.head_size, config.num_kv_heads, config.page_size
    arguments = {
        "K": "*u8",
        "V": "*u8",
        "SRC_BLOCKS": "*i32",
        "OUT": "*u8",
        "K_RATIO": "*fp32",
        "V_RATIO": "*fp32",
        "count": "i32",
        "num_pages": "i32",
    }
    constants = {
        "OUT_PAGE_STRIDE": heads * page * 2 * head_size,
        "OUT_HEAD_STRIDE": page * 2 * head_size,
        "OUT_TOKEN_STRIDE": 2 * head_size,
        "K_RATIO_HEAD_STRIDE": head_size,
        "K_RATIO_CHANNEL_STRIDE": 1,
        "V_RATIO_HEAD_STRIDE": head_size,
        "V_RATIO_CHANNEL_STRIDE": 1,
        **_cache_shape(config),
    }
    return KernelVariant(
        expand_kernel,
        tuple(arguments.items()),
        tuple(constants.items()),
        label=f"expand {_cache_label(config)}",
        aligned=("K", "V", "OUT"),
        num_warps=WARPS,
    )


def _cache_shape(config: RunnerConfig) -> dict[str, int]:
    page, head, token = _cache_strides(config)
    return {
        "PAGE_STRIDE": page,
        "TOKEN_STRIDE": token,
        "HEAD_STRIDE": head,
        "HEADS": config.num_kv_heads,
        "D": config.head_size,
        "PAGE": config.page_size,
        "ROWS": QUADS * 4 // config.head_size,
    }


def _cache_label(config: RunnerConfig) -> str:
    return f"{config.num_heads}:{config.num_kv_heads} d {config.head_size} {config.kv_format}, page {config.page_size}"
