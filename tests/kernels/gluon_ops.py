"""Triton's functions on values, for the emulator: shapes, arithmetic, inline asm, reductions and scans."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl

from tests.kernels.gluon_tensors import (
    BITS,
    CARRIER,
    DTYPES,
    MEMORY,
    OPS,
    Tensor,
    cast,
    check_ranks,
    op,
    promote,
    scalar,
    wrap,
)

# What inline asm means, by its text with single blanks.
ASM: dict[str, Callable[..., Sequence[torch.Tensor]]] = {}

# Making and shaping tensors


@op
def arange(start: int, end: int, layout: Any = None) -> Tensor:
    if end - start <= 0 or (end - start) & (end - start - 1):
        raise ValueError(f"arange({start}, {end}): the length must be a power of two")
    return Tensor(torch.arange(start, end, dtype=torch.int32), tl.int32)


@op
def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(cast(value, dtype).data.expand(*shape), dtype)


def _flat(args: tuple[Any, ...]) -> list[int]:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)


@op
def reshape(x: Tensor, *shape: Any) -> Tensor:
    if any(size < 1 for size in _flat(shape)):
        raise ValueError(f"reshape to {shape}")
    return x.like(x.data.reshape(_flat(shape)))


@op
def broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    check_ranks(x, y)
    one, other = torch.broadcast_tensors(x.data, y.data)
    return x.like(one), y.like(other)


@op
def join(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype != y.dtype:
        raise TypeError(f"join of {x.dtype} and {y.dtype}")
    return x.like(torch.stack(torch.broadcast_tensors(x.data, y.data), -1))


@op
def split(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1:] != [2]:
        raise ValueError(f"split wants a last dimension of 2, not {x.shape}")
    return x.like(x.data[..., 0]), x.like(x.data[..., 1])


OPS |= {
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "zeros_like": lambda x, *_, **__: full(x.shape, 0, x.dtype),
    "full_like": lambda x, value, *_, **__: full(x.shape, value, x.dtype),
    "expand_dims": lambda x, axis: x.like(x.data.unsqueeze(axis)),
    "permute": lambda x, *order: x.like(x.data.permute(_flat(order))),
    "trans": lambda x, *order: x.like(x.data.permute(_flat(order)) if order else x.data.mT),
    "ravel": lambda x: x.like(x.data.reshape(-1)),
    "broadcast_to": lambda x, *shape: x.like(x.data.expand(_flat(shape))),
    "gather": lambda src, index, axis: src.like(src.data.gather(axis, index.data.to(torch.int64))),
}


# Arithmetic


@op
def where(condition: Any, x: Any, y: Any) -> Tensor:
    chosen = cast(condition, tl.int1)
    one, other = promote(x if isinstance(y, Tensor) else scalar(x), y)
    check_ranks(chosen, one, other)
    return one.like(torch.where(chosen.data, one.data, other.data))


def _extremum(function: Callable[..., torch.Tensor], x: Any, y: Any) -> Tensor:
    lhs, rhs = (cast(v, tl.float32) if v.dtype == tl.bfloat16 else v for v in (scalar(x), scalar(y)))
    lhs, rhs = promote(lhs, rhs)
    return lhs.like(function(lhs.data, rhs.data))


OPS |= {
    "maximum": lambda x, y, propagate_nan=None: _extremum(torch.maximum, x, y),
    "minimum": lambda x, y, propagate_nan=None: _extremum(torch.minimum, x, y),
    "clamp": lambda x, min, max, propagate_nan=None: OPS["minimum"](OPS["maximum"](x, min), max),
    "cdiv": lambda x, div: (x + (div - 1)) // div,
}


def _floating(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Tensor]:
    def elementwise(value: Any) -> Tensor:
        x = scalar(value)
        if x.dtype not in (tl.float32, tl.float64):
            raise TypeError(f"{name} takes fp32 and fp64, not {x.dtype}")
        return x.like(function(x.data))

    return elementwise


for _name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil"):
    OPS[_name] = _floating(_name, getattr(torch, _name))
OPS |= {"sqrt_rn": OPS["sqrt"], "div_rn": operator.truediv, "fdiv": lambda x, y, **_: x / y, "cast": cast}
OPS |= {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "to_tensor": scalar}
OPS["abs"] = abs


@op
def mma_v2(a: Tensor, b: Tensor, acc: Tensor, input_precision: Any = None) -> Tensor:
    """(..., M, K) times (..., K, N) onto (..., M, N), products and sums in float32."""
    if a.dtype != b.dtype or not a.dtype.is_floating() or acc.dtype != tl.float32:
        raise TypeError(f"mma_v2 of {a.dtype} and {b.dtype} onto {acc.dtype} is not emulated")
    product = torch.matmul(a.data.float(), b.data.float())
    if list(product.shape) != acc.shape:
        raise ValueError(f"mma_v2 of {a.shape} and {b.shape} onto {acc.shape}")
    return acc.like(acc.data + product)


OPS["dot_fma"] = mma_v2


@op
def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Tensor | tuple[Tensor, ...]:
    """Calls the registered function: floats go in as they are, integers as signed ones of their width."""
    function = ASM.get(" ".join(asm.split()))
    if function is None:
        raise NotImplementedError(f"no emulate.register_asm for: {asm}")
    inputs = [scalar(x) for x in args]
    check_ranks(*inputs)
    memory = [x.data.to(MEMORY[x.dtype]) for x in inputs]
    memory = [x.view(BITS[x.itemsize]) if DTYPES[x.dtype].is_int() and x.dtype != torch.bool else x for x in memory]
    memory = list(torch.broadcast_tensors(*memory)) if memory else []
    outputs = function(*memory)
    dtypes = dtype if isinstance(dtype, (tuple, list)) else (dtype,)
    results = []
    for output, wanted in zip(outputs, dtypes, strict=True):
        if output.itemsize != MEMORY[wanted].itemsize or (memory and output.shape != memory[0].shape):
            raise TypeError(f"asm gave {output.dtype} {tuple(output.shape)} where {wanted} was declared: {asm}")
        results.append(Tensor(output.view(MEMORY[wanted]).to(CARRIER[wanted]), wanted))
    return tuple(results) if isinstance(dtype, (tuple, list)) else results[0]


# Reductions and scans


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _sliced(xs: tuple[Tensor, ...], axis: int, part: slice) -> tuple[Tensor, ...]:
    index = (slice(None),) * axis + (part,)
    return tuple(x.like(x.data[index]) for x in xs)


@op
def reduce(x: Any, axis: int | None, combine_fn: Callable[..., Any], keep_dims: bool = False) -> Any:
    xs = _tuple(x)
    rank = xs[0].data.dim()
    if axis is None:
        xs, axis = tuple(v.like(v.data.reshape(-1)) for v in xs), 0
    axis %= xs[0].data.dim()
    while (size := xs[0].shape[axis]) > 1:
        if size % 2:
            raise ValueError(f"reduce over {size} elements: not a power of two")
        pairs = (*_sliced(xs, axis, slice(0, None, 2)), *_sliced(xs, axis, slice(1, None, 2)))
        xs = _tuple(combine_fn(*pairs))
    index = (slice(None),) * axis + (0,)
    results = tuple(v.like(v.data[index]) for v in xs)
    if keep_dims:
        results = tuple(reshape(v, [1] * rank) if not v.shape else v.like(v.data.unsqueeze(axis)) for v in results)
    return results if isinstance(x, (tuple, list)) else results[0]


def _amount(x: Tensor, axis: int | None, keep_dims: bool, function: Callable[..., torch.Tensor]) -> Tensor:
    axes = list(range(x.data.dim())) if axis is None else [axis]
    return x.like(wrap(function(x.data, dim=axes, keepdim=keep_dims), x.dtype).to(x.data.dtype))


@op
def sum_(x: Tensor, axis: int | None = None, keep_dims: bool = False, dtype: Any = None) -> Tensor:
    if dtype is None and x.dtype.is_int() and x.dtype.primitive_bitwidth < 32:
        dtype = tl.int32 if x.dtype.is_int_signed() else tl.uint32
    return _amount(cast(x, dtype or x.dtype), axis, keep_dims, torch.sum)


def _extreme(
    function: Callable[..., torch.Tensor], x: Any, axis: int | None = None, *, keep_dims: bool = False
) -> Tensor:
    if x.dtype.primitive_bitwidth < 32:
        x = cast(x, tl.float32 if x.dtype.is_floating() else tl.int32)
    return _amount(x, axis, keep_dims, function)


OPS |= {
    "max": functools.partial(_extreme, torch.amax),
    "min": functools.partial(_extreme, torch.amin),
    "xor_sum": lambda x, axis=None, keep_dims=False: reduce(x, axis, operator.xor, keep_dims),
    "cumsum": lambda x, axis=0, reverse=False, dtype=None: associative_scan(
        cast(x, dtype or x.dtype), axis, operator.add, reverse
    ),
}


@op
def associative_scan(x: Any, axis: int, combine_fn: Callable[..., Any], reverse: bool = False) -> Any:
    """In log2(n) calls of the function, each on all elements: the order of a float sum is not the GPU's."""
    xs = _tuple(x)
    axis %= xs[0].data.dim()
    flipped = [axis] if reverse else []
    xs = tuple(v.like(v.data.flip(flipped)) for v in xs)
    step = 1
    while step < xs[0].shape[axis]:
        earlier, later = _sliced(xs, axis, slice(0, -step)), _sliced(xs, axis, slice(step, None))
        combined = _tuple(combine_fn(*earlier, *later))
        heads = _sliced(xs, axis, slice(0, step))
        xs = tuple(c.like(torch.cat((h.data, c.data), axis)) for h, c in zip(heads, combined, strict=True))
        step *= 2
    results = tuple(v.like(v.data.flip(flipped)) for v in xs)
    return results if isinstance(x, (tuple, list)) else results[0]
