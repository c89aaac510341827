"""Kernels built ahead of time, for an architecture that need not be here: `mjolnir precompile`.

What a process compiles at its first step depends on the model's shape, the most requests of a step, the most query
tokens of a request, and the strides of its tensors. All that is said here for a model as vLLM lays it out: a head-major
cache with a token's K and V side by side, a query that lies alone or inside of a fused QKV, an output of its own.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from mjolnir.errors import ConfigurationError
from mjolnir.kernels.apart import compile_apart
from mjolnir.kernels.compiler import KernelVariant, build_for
from mjolnir.kernels.variants import Choice, Strides, decode_variant, merge_variant, shape_of, siblings
from mjolnir.reference import e2m3
from mjolnir.runner import PACKED_HEAD_SIZES, RunnerConfig

SMS = {90: 132, 110: 20}  # of the device that an architecture stands for: H200; Jetson AGX Thor
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WORD = 4  # bytes


@dataclass(frozen=True)
class Model:
    """What an engine's kernels are compiled for.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: elements of a head.
        page_size: tokens of a page.
        kv_format: ``fp8`` or ``e2m3``.
        dtype: ``bf16`` or ``fp16``, of query and output.
        max_num_seqs: most requests of a step.
        max_q_len: most query tokens of a request: 1 + draft tokens.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int = 16
    kv_format: str = "fp8"
    dtype: str = "bf16"
    max_num_seqs: int = 256
    max_q_len: int = 1

    def config(self) -> RunnerConfig:
        """The runner's configuration.

        Raises:
            ConfigurationError: a shape that T5 does not take.
        """
        packed_sizes = PACKED_HEAD_SIZES["cuda"]
        if self.kv_format == "e2m3" and self.head_size not in packed_sizes:
            raise ConfigurationError(f"e2m3 with head size {self.head_size}: accepted: {packed_sizes}")
        return RunnerConfig(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.page_size,
            DTYPES[self.dtype],
            self.max_num_seqs,
            torch.device("cuda"),
            max_q_len=self.max_q_len,
            kv_format=self.kv_format,
        )


def architecture(name: str) -> int:
    """Compute capability, as 110, of ``sm_110``, ``sm_110a`` or ``110``.

    Raises:
        ConfigurationError: not one that the kernels are tuned for.
    """
    number = name.removeprefix("sm_").removesuffix("a")
    if not number.isdecimal() or int(number) not in SMS:
        accepted = ", ".join(f"sm_{arch}a" for arch in SMS)
        raise ConfigurationError(f"--arch {name}: accepted: {accepted}")
    return int(number)


def variants_of(model: Model, arch: int) -> list[KernelVariant]:
    """Every variant that a model's steps can need on an architecture, each once."""
    config = model.config()
    shapes = {n: shape_of(config, n, SMS[arch], f"sm_{arch}") for n in range(1, config.max_q_len + 1)}
    found: dict[KernelVariant, KernelVariant] = {}
    for choice in _first_choices(model):
        for each in {choice, *siblings(choice, shapes)}:
            shape = shapes[each.q_len]
            for variant in (decode_variant(shape, each), merge_variant(shape, each)):
                found.setdefault(dataclasses.replace(variant, label=""), variant)
    return list(found.values())


def build(models: Iterable[Model], arch: int, directory: Path, *, workers: int = 1) -> int:
    """Compile all that models need into a kernel cache's directory.

    Args:
        models: for which.
        arch: compute capability, as 110.
        directory: what ``MJOLNIR_ATTN_KERNEL_CACHE`` is to name on the machine that runs them.
        workers: processes that compile, or threads where there is little to do.

    Returns:
        How many variants the directory holds for them.

    Raises:
        ConfigurationError: a shape that T5 does not take, or the directory can't be written.
    """
    variants = [variant for model in models for variant in variants_of(model, arch)]
    target = GPUTarget("cuda", arch, 32)
    compile_apart(variants, directory, target, processes=workers)
    build_for(variants, target, directory, workers=workers)
    return len(variants)


def _first_choices(model: Model) -> Iterator[Choice]:
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_size
    row = e2m3.row_bytes(size) if model.kv_format == "e2m3" else size
    token = 2 * row // WORD
    cache = (kv_heads * model.page_size * token, model.page_size * token, token)
    scales = (False, True) if model.kv_format == "e2m3" else (False,)
    for query_token in (heads * size, (heads + 2 * kv_heads) * size):
        for channel_scales in scales:
            yield Choice(
                q_len=1,
                causal=True,
                merge_here=False,
                write_lse=False,
                channel_scales=channel_scales,
                q_dtype=DTYPES[model.dtype],
                strides=Strides(query_token, size, heads * size, size, *cache),
            )
