"""Values in an emulated Gluon kernel: torch tensors under Triton's types and its promotion rules.

See `tests.kernels.gluon_emulator`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.semantic import TritonSemantic

SEMANTIC = TritonSemantic(None)
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
