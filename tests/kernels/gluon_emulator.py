"""Runs the Python source of Gluon kernels on the CPU, on whole logical tensors.

Triton's interpreter cannot run Gluon. Here the function under `@gluon.jit`, and every jitted function that it reaches
through its globals, runs as plain Python with Triton's names replaced:

    emulate(kernel, grid, *args, **constexprs)     # torch tensors are pointers; programs run one after another
    emulate.register_asm(text, function)           # what an inline asm text means, elementwise on torch tensors

Types follow Triton's own promotion rules (the code of its semantic layer), integers wrap, `//` and `%` truncate, fp8
casts saturate. Layouts are constructed but mean nothing, so a wrong layout, a missing barrier and anything that only
exists between threads go unseen; a program that waits for a later one hangs. Unlike on a GPU, `max`, `min`, `maximum`
and `minimum` hand NaN on. A masked load without `other` gives all bits set: NaN, or -1.
"""

import builtins
import dataclasses
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

SEMANTIC = TritonSemantic(None)
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element to its signed integer
FP8_MAX = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
# How a type lies in memory, and where torch computes too little with that, what holds it meanwhile.
MEMORY = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.uint8: torch.uint8,
    tl.uint16: torch.uint16,
    tl.uint32: torch.uint32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
CARRIER = MEMORY | {tl.uint16: torch.int32, tl.uint32: torch.int64}
DTYPES = {memory: dtype for dtype, memory in MEMORY.items()}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The whole storage of a kernel's argument, as the integers of its elements' width."""

    name: str
    bits: torch.Tensor

    def check(self, offsets: torch.Tensor, access: str) -> None:
        """Raise IndexError unless every element offset lies inside of the storage."""
        if not offsets.numel():
            return
        low, high = (int(bound) for bound in offsets.aminmax())
        size = self.bits.numel()
        if low < 0 or high >= size:
            raise IndexError(
                f"{access} {self.name}: element offsets {low} to {high} leave the storage of {size} elements"
            )


def _operator(function: Callable[..., torch.Tensor], *, reflected: bool = False, result: Any = None) -> Any:
    def method(self: "Tensor", other: Any) -> Any:
        if other is None:
            return NotImplemented
        lhs, rhs = promote(other, self) if reflected else promote(self, other)
        if function in (torch.bitwise_left_shift, torch.bitwise_right_shift) and not lhs.dtype.is_int():
            raise TypeError(f"cannot shift {lhs.dtype}")
        if result is None and lhs.dtype == tl.int1 and function in (torch.add, torch.sub, torch.mul):
            raise TypeError("arithmetic on two int1 operands: cast one of them first")
        return Tensor(wrap(function(lhs.data, rhs.data), result or lhs.dtype), result or lhs.dtype)

    return method


def _division(function: str, *, reflected: bool = False) -> Any:
    def method(self: "Tensor", other: Any) -> Any:
        lhs, rhs = promote(other, self, division=True) if reflected else promote(self, other, division=True)
        if function == "/":
            if lhs.dtype.is_int():
                lhs, rhs = cast(lhs, tl.float32), cast(rhs, tl.float32)
            return Tensor(lhs.data / rhs.data, lhs.dtype)
        if function == "%":
            return Tensor(torch.fmod(lhs.data, rhs.data), lhs.dtype)
        if not lhs.dtype.is_int():
            raise TypeError(f"// on {lhs.dtype}")
        return Tensor(torch.div(lhs.data, rhs.data, rounding_mode="trunc"), lhs.dtype)

    return method


class Tensor:
    """A value in a kernel: a torch tensor, 0-d for a scalar, and its Triton type.

    Of pointers the torch tensor is the int64 element offsets into `buffer`.
    """

    def __init__(self, data: torch.Tensor, dtype: Any, buffer: Buffer | None = None) -> None:
        self.data = data
        self.dtype = dtype
        self.buffer = buffer

    def like(self, data: torch.Tensor) -> "Tensor":
        """The same elements in another shape."""
        return Tensor(data, self.dtype, self.buffer)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def numel(self) -> int:
        return int(self.data.numel())

    @property
    def type(self) -> Any:
        return gl.distributed_type(self.dtype, self.shape, gl.AutoLayout()) if self.data.dim() else self.dtype

    @property
    def T(self) -> "Tensor":  # noqa: N802 - Triton's name
        return self.like(self.data.mT)

    def __getattr__(self, name: str) -> Any:
        if name in OPS and hasattr(tl.tensor, name):
            return lambda *args, **kwargs: OPS[name](self, *args, **kwargs)
        raise AttributeError(f"tensors have no {name!r} in the emulator")

    def to(self, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> "Tensor":
        if fp_downcast_rounding not in (None, "rtne"):
            raise NotImplementedError(f"fp_downcast_rounding {fp_downcast_rounding!r} is not emulated")
        return cast(self, dtype, bitcast)

    def __bool__(self) -> bool:
        if self.data.dim():
            raise TypeError(f"a tensor of shape {self.shape} has no truth value")
        return bool(self.data)

    def __getitem__(self, index: Any) -> "Tensor":
        index = index if isinstance(index, tuple) else (index,)
        if any(i is not None and i != slice(None) for i in index):
            raise TypeError(f"only : and None index a tensor, not {index}")
        return self.like(self.data[index])

    def __add__(self, other: Any) -> "Tensor":
        if isinstance(other, Tensor) and other.buffer and not self.buffer:
            return _moved(other, self, 1)
        return _moved(self, other, 1) if self.buffer else _add(self, other)

    def __radd__(self, other: Any) -> "Tensor":
        return self.__add__(other)

    def __sub__(self, other: Any) -> "Tensor":
        return _moved(self, other, -1) if self.buffer else _sub(self, other)

    def __neg__(self) -> "Tensor":
        return 0 - self if self.dtype.is_int() else self.like(-self.data)

    def __invert__(self) -> "Tensor":
        return self.like(wrap(~self.data, self.dtype))

    def __abs__(self) -> "Tensor":
        return self.like(self.data.abs())

    __hash__ = None  # type: ignore[assignment] # == compares elements
    __rsub__ = _operator(torch.sub, reflected=True)
    __mul__ = _operator(torch.mul)
    __rmul__ = _operator(torch.mul, reflected=True)
    __truediv__ = _division("/")
    __rtruediv__ = _division("/", reflected=True)
    __floordiv__ = _division("//")
    __rfloordiv__ = _division("//", reflected=True)
    __mod__ = _division("%")
    __rmod__ = _division("%", reflected=True)
    __and__ = _operator(torch.bitwise_and)
    __rand__ = _operator(torch.bitwise_and, reflected=True)
    __or__ = _operator(torch.bitwise_or)
    __ror__ = _operator(torch.bitwise_or, reflected=True)
    __xor__ = _operator(torch.bitwise_xor)
    __rxor__ = _operator(torch.bitwise_xor, reflected=True)
    __lshift__ = _operator(torch.bitwise_left_shift)
    __rlshift__ = _operator(torch.bitwise_left_shift, reflected=True)
    __rshift__ = _operator(torch.bitwise_right_shift)
    __rrshift__ = _operator(torch.bitwise_right_shift, reflected=True)
    __lt__ = _operator(torch.lt, result=tl.int1)
    __le__ = _operator(torch.le, result=tl.int1)
    __gt__ = _operator(torch.gt, result=tl.int1)
    __ge__ = _operator(torch.ge, result=tl.int1)
    __eq__ = _operator(torch.eq, result=tl.int1)
    __ne__ = _operator(torch.ne, result=tl.int1)


_add, _sub = _operator(torch.add), _operator(torch.sub)


def scalar(value: Any, dtype: Any = None) -> Tensor:
    """A Python number as a 0-d tensor, of Triton's type for that number unless told."""
    if type(value) is Tensor:
        return value
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"cannot make a tensor of {value!r}")
    dtype = dtype or SEMANTIC.to_tensor_type(value)
    if dtype.is_int() and not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
        raise ValueError(f"scalar {value} is out of range for {dtype}")
    return Tensor(torch.tensor(value, dtype=CARRIER[dtype]), dtype)


def wrap(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Keep the carrier of an unsigned type inside of its width."""
    if dtype in (tl.uint16, tl.uint32):
        return data & ((1 << dtype.primitive_bitwidth) - 1)
    return data


def cast(value: Any, dtype: Any, bitcast: bool = False) -> Tensor:
    x = scalar(value)
    if dtype == x.dtype:
        return x
    if dtype not in CARRIER or x.buffer:
        raise NotImplementedError(f"a cast from {x.dtype} to {dtype} is not emulated")
    if bitcast:
        if dtype.primitive_bitwidth != x.dtype.primitive_bitwidth:
            raise ValueError(f"cannot bitcast {x.dtype} to {dtype}")
        return Tensor(x.data.to(MEMORY[x.dtype]).view(MEMORY[dtype]).to(CARRIER[dtype]), dtype)
    if dtype == tl.int1:
        return Tensor(x.data != 0, dtype)
    data = x.data
    if (largest := FP8_MAX.get(dtype.name)) is not None:
        data = data.float().clamp(-largest, largest)
    elif dtype in (tl.uint16, tl.uint32):
        data = data.to(torch.int64)
    return Tensor(wrap(data, dtype).to(CARRIER[dtype]), dtype)


def promote(lhs: Any, rhs: Any, *, division: bool = False) -> tuple[Tensor, Tensor]:
    """Both operands in the type that Triton computes in; Python numbers adapt to tensors."""
    kinds = [not isinstance(x, Tensor) for x in (lhs, rhs)]
    types_ = [SEMANTIC.to_tensor_type(x) if number else x.dtype for x, number in zip((lhs, rhs), kinds, strict=True)]
    if types_[0].is_ptr() or types_[1].is_ptr():
        raise NotImplementedError("of pointers, only + and - with integers are emulated")
    dtype = SEMANTIC.computation_type_impl(types_[0], kinds[0], types_[1], kinds[1], division)
    lhs, rhs = (scalar(x, dtype) if number else cast(x, dtype) for x, number in zip((lhs, rhs), kinds, strict=True))
    check_ranks(lhs, rhs)
    return lhs, rhs


def check_ranks(*tensors: Tensor) -> None:
    """Gluon broadcasts scalars and dimensions of 1, never ranks."""
    if len({x.data.dim() for x in tensors} - {0}) > 1:
        raise ValueError(f"cannot broadcast, rank mismatch: {[x.shape for x in tensors]}")


def _moved(pointer: Tensor, offset: Any, sign: int) -> Tensor:
    offset = scalar(offset)
    if not offset.dtype.is_int() or offset.buffer:
        raise TypeError(f"cannot move a pointer by {offset.dtype}")
    check_ranks(pointer, offset)
    return pointer.like(pointer.data + sign * offset.data.to(torch.int64))


F = TypeVar("F", bound=Callable[..., Any])
OPS: dict[str, Callable[..., Any]] = {}


def op(function: F) -> F:
    """Stand in for Triton's function of this name (less the underscore that spares Python's own)."""
    OPS[function.__name__.rstrip("_")] = function
    return function


# Memory


def _addresses(access: str, pointer: Tensor, mask: Any, *others: Tensor) -> tuple[Buffer, Any, Any, Any]:
    """The buffer, the live offsets, which elements these are, and the other operands in the pointers' shape."""
    if not isinstance(pointer, Tensor) or pointer.buffer is None:
        raise TypeError(f"{access} wants a pointer")
    mask = scalar(True if mask is None else mask)
    if mask.dtype != tl.int1:
        raise TypeError(f"{access} wants an int1 mask, not {mask.dtype}")
    check_ranks(pointer, mask, *others)
    if not pointer.shape and (mask.shape or any(x.shape for x in others)):
        raise ValueError(f"{access} a scalar pointer with a tensor")
    offsets, live, *data = torch.broadcast_tensors(pointer.data, mask.data, *(x.data for x in others))
    pointer.buffer.check(offsets[live], f"{access} {'through' if pointer.shape else 'at'}")
    return pointer.buffer, offsets[live], live, data


def _bits(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    memory = data.to(MEMORY[dtype])
    return memory.view(BITS[memory.itemsize])


def _value(bits: torch.Tensor, dtype: Any) -> torch.Tensor:
    return (bits != 0) if dtype == tl.int1 else bits.view(MEMORY[dtype]).to(CARRIER[dtype])


@op
def load(pointer: Tensor, mask: Any = None, other: Any = None, **_hints: Any) -> Tensor:
    if mask is None and other is not None:
        raise ValueError("`other` cannot be provided without `mask`")
    dtype = pointer.dtype.element_ty
    fill = () if other is None else (cast(other, dtype),)
    buffer, offsets, live, data = _addresses("load", pointer, mask, *fill)
    if live.all():
        return Tensor(_value(buffer.bits[offsets].view(live.shape), dtype), dtype)
    bits = _bits(data[0], dtype).clone() if data else torch.full(live.shape, -1, dtype=buffer.bits.dtype)
    bits[live] = buffer.bits[offsets]
    return Tensor(_value(bits, dtype), dtype)


@op
def store(pointer: Tensor, value: Any, mask: Any = None, **_hints: Any) -> None:
    dtype = pointer.dtype.element_ty
    buffer, offsets, live, data = _addresses("store", pointer, mask, cast(value, dtype))
    buffer.bits[offsets] = _bits(data[0], dtype)[live]


@op
def atomic_add(pointer: Tensor, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
    """Elements on one address add up in their order; returns what each found there."""
    dtype = pointer.dtype.element_ty
    buffer, offsets, live, data = _addresses("atomic_add", pointer, mask, cast(val, dtype))
    offsets, order = offsets.sort(stable=True)
    values = data[0][live][order]
    _, group, counts = offsets.unique_consecutive(return_inverse=True, return_counts=True)
    before = (values.cumsum(0) - values).to(values.dtype)
    last = counts.cumsum(0) - 1
    old = wrap(_value(buffer.bits[offsets], dtype) + before - before[(last - counts + 1)[group]], dtype)
    buffer.bits[offsets[last]] = _bits(wrap(old + values, dtype)[last], dtype)
    found = torch.zeros_like(old)
    found[order] = old
    result = torch.zeros(live.shape, dtype=CARRIER[dtype])
    result[live] = found
    return Tensor(result, dtype)


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
def warpgroup_mma(a: Any, b: Any, acc: Tensor, *, use_acc: Any = True, **_options: Any) -> Tensor:
    """The left operand is a tensor or in shared memory, the right one in shared memory; done at once."""
    if not isinstance(b, Shared):
        raise TypeError("warpgroup_mma wants its right operand in shared memory")
    a, b = (x.load() if isinstance(x, Shared) else x for x in (a, b))
    return mma_v2(a, b, acc if bool(scalar(use_acc)) else acc.like(torch.zeros_like(acc.data)))


@op
def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Tensor] = ()) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


@op
def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Tensor | tuple[Tensor, ...]:
    """Calls the registered function: floats go in as they are, integers as signed ones of their width."""
    function = emulate.asm.get(" ".join(asm.split()))
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


# Programs, loops, assertions


def loop(*bounds: Any, **_hints: Any) -> Iterator[Tensor]:
    """`range` in a kernel: bounds are numbers or 0-d tensors, indices are int32 or int64 scalars."""
    wide = any(isinstance(bound, Tensor) and bound.dtype == tl.int64 for bound in bounds)
    for i in range(*(int(bound.data) if isinstance(bound, Tensor) else bound for bound in bounds)):
        yield scalar(i, tl.int64 if wide else tl.int32)


OPS |= {
    "range": loop,
    "static_range": range,
    "program_id": lambda axis: scalar(emulate.program[axis]),
    "num_programs": lambda axis: scalar(emulate.grid[axis]),
    "num_warps": lambda: emulate.num_warps,
}


@op
def static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise AssertionError(message)


@op
def device_assert(condition: Any, message: str = "", mask: Any = None) -> None:
    condition = cast(condition, tl.int1)
    if mask is not None:
        condition = condition | ~cast(mask, tl.int1)
    if not condition.data.all():
        raise AssertionError(message)


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """What orders threads or talks to the compiler."""


OPS |= dict.fromkeys(
    ("barrier", "thread_barrier", "debug_barrier", "fence_async_shared", "assume", "static_print", "device_print"),
    nothing,
) | dict.fromkeys(
    ("convert_layout", "set_auto_layout", "multiple_of", "max_contiguous", "max_constancy"), lambda x, *_, **__: x
)


# Shared memory


class Shared:
    """A block of shared memory, as bytes; of what no program has stored, every bit is set, which is NaN for a float."""

    def __init__(self, data: torch.Tensor, dtype: Any) -> None:
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(tuple(order)), self.dtype)

    def index(self, index: Any) -> "Shared":
        return Shared(self.data[int(scalar(index).data)], self.dtype)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], _layout: Any) -> "Shared":
        return Shared(self.data.view(MEMORY[dtype]).view(tuple(shape)), dtype)

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(f"{value.dtype}{value.shape} stored in shared memory of {self.dtype}{self.shape}")
        self.data.copy_(value.data.to(self.data.dtype))

    def load(self, _layout: Any = None) -> Tensor:
        return Tensor(self.data.clone().to(CARRIER[self.dtype]), self.dtype)


@op
def allocate_shared_memory(dtype: Any, shape: Sequence[int], _layout: Any, value: Tensor | None = None) -> Shared:
    shared = Shared(torch.empty(tuple(shape), dtype=MEMORY[dtype]), dtype)
    _poison(shared)
    if value is not None:
        shared.store(value)
    return shared


def _poison(shared: Shared) -> None:
    shared.data.copy_(torch.full(shared.data.shape, -1, dtype=BITS[shared.data.itemsize]).view(shared.data.dtype))


@op
def async_copy_global_to_shared(smem: Shared, pointer: Tensor, mask: Any = None, **_hints: Any) -> None:
    """Zeros where the mask is false. Until somebody waits for the copy's group, the memory is as if never stored to."""
    if pointer.shape != smem.shape:
        raise ValueError(f"a copy of {pointer.shape} to shared memory of {smem.shape}")
    value = load(pointer, mask) if mask is None else load(pointer, mask, 0)
    _poison(smem)
    emulate.copies[-1].append((smem, value))


@op
def commit_group() -> None:
    emulate.copies.append([])


@op
def wait_group(num_outstanding: int = 0) -> None:
    """Copies that were not committed are not waited for."""
    done = max(0, len(emulate.copies) - 1 - num_outstanding)
    for smem, value in itertools.chain(*emulate.copies[:done]):
        smem.store(value)
    del emulate.copies[:done]


# From Triton's names to ours


def unwrap(value: Any) -> Any:
    """A constexpr's value, also inside of tuples."""
    if isinstance(value, tl.constexpr):
        return unwrap(value.value)
    return tuple(unwrap(v) for v in value) if type(value) in (tuple, tl.tuple) else value


OPS["constexpr"] = unwrap


def _unless_number(name: str) -> Callable[..., Any]:
    """Python's min or max: Triton's when a tensor is among the arguments."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and any(isinstance(x, Tensor) for x in args):
            return OPS[f"{name}imum"](*args)
        return getattr(builtins, name)(*args, **kwargs)

    return function


BUILTINS = vars(builtins) | {"range": loop, "min": _unless_number("min"), "max": _unless_number("max")}


class Namespace:
    """A module as a kernel sees it."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        ours = self._module.__name__.split(".")[0] == "triton"
        if name.startswith("gdc_"):
            return nothing
        if ours and name in OPS:
            return OPS[name]
        return translate(getattr(self._module, name))


class Globals(dict[str, Any]):
    """A jitted function's globals, translated when asked for."""

    def __init__(self, real: dict[str, Any]) -> None:
        super().__init__(__builtins__=BUILTINS)
        self._real = real

    def __missing__(self, name: str) -> Any:
        self[name] = nothing if name.startswith("gdc_") else translate(self._real[name])
        return self[name]


def _unknown(name: str) -> Callable[..., Any]:
    def function(*_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(f"{name} is not emulated")

    return function


def translate(value: Any) -> Any:
    """What a kernel gets for a global of its module or for an attribute of a module."""
    if isinstance(value, types.ModuleType):
        return Namespace(value)
    if isinstance(value, (tl.constexpr, tuple)):
        return unwrap(value)
    if value is tl.tensor:  # gl.tensor is the same class
        return Tensor
    if callable(value) and str(getattr(value, "__module__", "")).split(".")[0] == "triton":
        name = getattr(value, "__name__", "")
        if name in OPS:
            return OPS[name]
        if name.startswith("gdc_"):
            return nothing
        if getattr(value, "__triton_builtin__", False):
            return _unknown(f"{value.__module__}.{name}")
    if isinstance(value, (JITFunction, InterpretedFunction)):
        return as_python(value.fn)
    return value


def as_python(function: types.FunctionType) -> types.FunctionType:
    """The jitted function's Python function, in translated globals and cells."""
    if id(function) not in emulate.functions:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        result = types.FunctionType(
            function.__code__, Globals(function.__globals__), function.__name__, unwrap(function.__defaults__), cells
        )
        result.__kwdefaults__ = {name: unwrap(v) for name, v in (function.__kwdefaults__ or {}).items()}
        emulate.functions[id(function)] = result
        for cell, real in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = translate(real.cell_contents)
    return emulate.functions[id(function)]


def argument(name: str, value: Any) -> Any:
    """What a kernel gets for an argument that is not a constexpr."""
    value = unwrap(value)
    if isinstance(value, tuple):
        return tuple(argument(f"{name}[{i}]", v) for i, v in enumerate(value))
    if value is None or isinstance(value, bool):
        return value if value is None else scalar(value)
    if isinstance(value, int):
        return scalar(value, tl.int32 if -(2**31) <= value < 2**31 else tl.int64)
    if isinstance(value, float):
        return scalar(value, tl.float32)
    if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or value.device.type != "cpu":
        raise TypeError(f"argument {name}: {value!r} is no CPU tensor of a known type")
    size = value.untyped_storage().nbytes() // value.itemsize
    bits = value.detach().as_strided((size,), (1,), 0).view(BITS[value.itemsize])
    offset = torch.tensor(value.storage_offset(), dtype=torch.int64)
    return Tensor(offset, tl.pointer_type(DTYPES[value.dtype]), Buffer(name, bits))


class Emulator:
    """Runs kernels; while one runs, it knows which program runs."""

    def __init__(self) -> None:
        self.asm: dict[str, Callable[..., Sequence[torch.Tensor]]] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.program: tuple[int, ...] = (0, 0, 0)
        self.num_warps: int = 4
        self.copies: list[list[tuple[Shared, Tensor]]] = [[]]  # of shared memory, by group; the last is not committed

    def register_asm(self, text: str, function: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Give an inline asm text (white space aside) its meaning: torch tensors in, a tuple of tensors out.

        Outputs may be of any type as wide as the one declared: integers for float16 are its bits.
        """
        self.asm[" ".join(unwrap(text).split())] = function

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constexprs: Any) -> None:
        """Launch a kernel as `kernel[grid](*args, **constexprs)` would; launch options such as num_warps are taken.

        Raises:
            IndexError: a load, store or atomic outside of the storage of its tensor.
            NotImplementedError: the kernel uses something that the emulator lacks.
        """
        signature = inspect.signature(kernel.fn)
        options = {
            name: constexprs.pop(name) for name in LAUNCH_OPTIONS if name in constexprs.keys() - signature.parameters
        }
        bound = signature.bind(*args, **constexprs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            constant = "constexpr" in str(signature.parameters[name].annotation)
            bound.arguments[name] = unwrap(value) if constant else argument(name, value)
        self.functions = {}
        self.num_warps = options.get("num_warps", 4)
        self.grid = (*grid, 1, 1)[:3]
        function = as_python(kernel.fn)
        for z, y, x in itertools.product(*(range(size) for size in reversed(self.grid))):
            self.program = (x, y, z)
            self.copies = [[]]
            try:
                function(*bound.args, **bound.kwargs)
            except Exception as error:
                error.add_note(f"in program {self.program} of {kernel.fn.__name__}")
                raise


emulate: Emulator = Emulator()
