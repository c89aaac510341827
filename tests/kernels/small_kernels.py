"""Two small kernels, and what a test of compiling asks about them."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mjolnir.kernels.compiler import KernelCache, KernelVariant

SM90, SM110 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 110, 32)


@triton.jit
def scaled(source, target, n, factor, block: tl.constexpr, twice: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(source + at, mask=at < n) * factor
    tl.store(target + at, value * 2 if twice else value, mask=at < n)


@gluon.jit
def reversed_in_place(x, block: gl.constexpr, layout: gl.constexpr):
    at = gl.arange(0, block, layout=layout)
    gl.store(x + block - 1 - at, gl.load(x + at))


def variant(block: int = 256, twice: bool = False, **fields) -> KernelVariant:
    return KernelVariant(
        scaled,
        arguments=(("source", "*fp32"), ("target", "*fp32"), ("n", "i32"), ("factor", "fp32")),
        constants=(("block", block), ("twice", twice)),
        label=f"scaled {block}",
        **fields,
    )


def gluon_variant(per_thread: int = 1) -> KernelVariant:
    layout = gl.BlockedLayout([per_thread], [32], [4], [0])
    return KernelVariant(reversed_in_place, (("x", "*i32"),), (("block", 128), ("layout", layout)), "reversed")


def counts(cache: KernelCache) -> tuple[int, int]:
    return cache.loads, cache.compiles
