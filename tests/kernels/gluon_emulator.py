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
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.kernels import gluon_ops
from tests.kernels.gluon_memory import COPIES
from tests.kernels.gluon_tensors import BITS, DTYPES, OPS, Buffer, Tensor, cast, op, scalar

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid")

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
        self.functions: dict[int, types.FunctionType] = {}
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.program: tuple[int, ...] = (0, 0, 0)
        self.num_warps: int = 4

    def register_asm(self, text: str, function: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Give an inline asm text (white space aside) its meaning: torch tensors in, a tuple of tensors out.

        Outputs may be of any type as wide as the one declared: integers for float16 are its bits.
        """
        gluon_ops.ASM[" ".join(unwrap(text).split())] = function

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
            COPIES[:] = [[]]
            try:
                function(*bound.args, **bound.kwargs)
            except Exception as error:
                error.add_note(f"in program {self.program} of {kernel.fn.__name__}")
                raise


emulate: Emulator = Emulator()
