"""Memory of an emulated kernel: its arguments' storage, and shared memory with what copies and multiplies from it."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from tests.kernels.gluon_ops import mma_v2
from tests.kernels.gluon_tensors import BITS, CARRIER, MEMORY, Buffer, Tensor, cast, check_ranks, op, scalar, wrap

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


# The running program's copies into shared memory that nobody has waited for, by group; the last is not committed.
COPIES: list[list[tuple[Shared, Tensor]]] = [[]]


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
    COPIES[-1].append((smem, value))


@op
def commit_group() -> None:
    COPIES.append([])


@op
def wait_group(num_outstanding: int = 0) -> None:
    """Copies that were not committed are not waited for."""
    done = max(0, len(COPIES) - 1 - num_outstanding)
    for smem, value in itertools.chain(*COPIES[:done]):
        smem.store(value)
    del COPIES[:done]


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
