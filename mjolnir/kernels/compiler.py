"""Kernels compiled ahead of their first launch, kept on disk, and launched without Triton's specialisation.

A `KernelVariant` says all that a compilation depends on, so there are no variants but those that were asked for:
nothing is derived from the values of the arguments, and after `KernelCache.precompile` no launch compiles.

    cache = KernelCache(settings.kernel_cache_directory)
    cache.precompile(variants)
    cache.freeze()
    launch(cache.get(variant), (programs,), arguments)
"""

import contextlib
import hashlib
import pkgutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import FileCacheManager
from triton.runtime.driver import driver

import mjolnir
from mjolnir.errors import ConfigurationError, KernelMissingError
from mjolnir.kernels.directory import KernelDirectory

KEPT = (".cubin", ".json", ".ptx")  # of what a compilation leaves behind; the rest is ten times as large
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]

# One thread at a time goes from Python to Triton's IR: `ast.parse` counts its recursion in one place for all threads,
# and in Python 3.11 fails ("AST constructor recursion depth mismatch") when another thread interrupts it. All of that
# step holds the interpreter's lock anyway; what follows it, LLVM and ptxas, runs beside other threads.
_front_end = threading.Lock()

# Of this process: variants loaded and compiled, and the seconds that the compilations took.
CACHE_STATS: dict[str, float] = {"loaded": 0, "compiled": 0, "compile_seconds": 0.0}


class _Serialised:
    """What Triton compiles, with the step from Python to IR under a lock."""

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        with _front_end:
            return super().make_ir(*args, **kwargs)  # type: ignore[misc]


class _TritonSource(_Serialised, ASTSource):
    pass


class _GluonSource(_Serialised, GluonASTSource):
    pass


@dataclass(frozen=True)
class KernelVariant:
    """A kernel and everything that its machine code depends on but the target.

    Attributes:
        kernel: a ``triton.jit`` or ``gluon.jit`` function whose run-time arguments come ahead of its constants.
        arguments: (name, Triton type) of every run-time argument, in order: ``*i32``, ``*bf16``, ``i32``, ``fp32``.
        constants: (name, value) of every ``constexpr``.
        label: what people call it; no part of the key.
        aligned: arguments that the compiler may take as multiples of 16 (addresses: bytes). The caller's promise:
            nobody checks it at a launch.
        num_warps: warps of a program.
        num_stages: depth of Triton's own load pipeline.
        maxnreg: most registers of a thread; None for no cap.
        launch_pdl: programmatic dependent launch.

    Raises:
        ConfigurationError: the names are not the kernel's parameters, each once and arguments first, or a constant has
            no stable text.
    """

    kernel: Any
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    label: str
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int | None = None
    launch_pdl: bool = False

    def __post_init__(self) -> None:
        if not hasattr(self.kernel, "cache_key"):
            raise ConfigurationError(f"{self.label}: {self.kernel!r} is not compiled (TRITON_INTERPRET?)")
        names, constants = tuple(dict(self.arguments)), tuple(dict(self.constants))
        parameters = tuple(self.kernel.arg_names)
        if parameters[: len(names)] != names or sorted(parameters[len(names) :]) != sorted(constants):
            raise ConfigurationError(
                f"{self.label}: arguments {names} and constants {constants}: accepted: {self.kernel.__name__}'s "
                f"parameters {parameters}, each once and arguments first"
            )
        if unknown := set(self.aligned) - set(names):
            raise ConfigurationError(f"{self.label}: aligned {sorted(unknown)}: accepted: {names}")
        for name, value in self.constants:
            _text(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Python can't pickle a jitted function: it takes it for an impostor of the plain one of its name.
        named = f"{self.kernel.__module__}:{self.kernel.__name__}"
        return _unpickled, (named, *(getattr(self, field.name) for field in fields(self)[1:]))

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compilation options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "launch_pdl": self.launch_pdl}
        return options if self.maxnreg is None else {**options, "maxnreg": self.maxnreg}

    @property
    def source(self) -> ASTSource:
        """What Triton compiles."""
        constants = dict(self.constants)
        parameters = self.kernel.arg_names
        types = {name: dict(self.arguments).get(name, "constexpr") for name in parameters}
        attributes = {(parameters.index(name),): DIVISIBLE_BY_16 for name in self.aligned}
        kind = _GluonSource if self.kernel.is_gluon() else _TritonSource
        return kind(self.kernel, types, constants, attributes)

    def key(self, target: Any) -> str:
        """Content hash (64 hex digits) for a ``GPUTarget``: equal keys mean equal machine code.

        Covers the source of the kernel and of all that it calls, this package's and Triton's version, ptxas, the
        settings and variables that change code generation, and every field but the label.
        """
        backend = make_backend(target)
        parts = [
            self.kernel.cache_key,
            mjolnir.__version__,
            triton.__version__,
            repr(target),
            backend.hash(),
            backend.parse_options(self.options).hash(),
            repr(sorted(get_cache_invalidating_env_vars().items())),
            repr((self.arguments, sorted(self.aligned), self.options)),
            *sorted(_text(name, value) for name, value in self.constants),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _unpickled(named: str, *rest: Any) -> KernelVariant:
    return KernelVariant(pkgutil.resolve_name(named), *rest)


class KernelCache:
    """The compiled variants of a process, backed by a directory; safe to use from several threads.

    Args:
        directory: where compiled variants are kept, one folder each; made with mode 0700. None keeps nothing. One that
            can't be used costs one warning, and the time to compile.

    Attributes:
        loads: variants that came from the directory.
        compiles: variants that were compiled.
        compile_seconds: time that compiling took, as the caller felt it.
    """

    def __init__(self, directory: Path | None) -> None:
        self.store = KernelDirectory(directory)
        self.loads = 0
        self.compiles = 0
        self.compile_seconds = 0.0
        self.frozen = False
        self._kernels: dict[tuple[str, int | None], CompiledKernel] = {}
        self._lock = threading.RLock()

    def get(self, variant: KernelVariant, target: Any = None) -> CompiledKernel:
        """A compiled variant, ready to launch on the current device.

        With ``target``, a ``GPUTarget``, for that architecture and not to be launched; no GPU is needed.

        Raises:
            KernelMissingError: it would have to be compiled or loaded now, but the cache is frozen or a stream capture
                is under way.
        """
        return self.precompile([variant], target)[0]

    def precompile(
        self, variants: Iterable[KernelVariant], target: Any = None, *, workers: int = 1
    ) -> list[CompiledKernel]:
        """Like `get` for many; ``workers`` threads compile what is missing."""
        device = None if target else driver.active.get_current_device()
        target = target or driver.active.get_current_target()
        with self._lock:
            wanted = [(variant, (variant.key(target), device)) for variant in variants]
            missing = {slot: variant for variant, slot in wanted if slot not in self._kernels}
            if missing:
                self._refuse_if_late(missing.values())
                loaded = self._load(missing)
                rest = {slot: variant for slot, variant in missing.items() if slot not in loaded}
                self._kernels |= loaded | self._compile(rest, target, workers)
            kernels = [self._kernels[slot] for _, slot in wanted]
            if device is not None:
                for slot in missing:
                    _ = self._kernels[slot].run  # loads the machine code onto the device
        return kernels

    def freeze(self) -> None:
        """From here on a variant that is not in memory is an error."""
        self.frozen = True

    def _refuse_if_late(self, missing: Iterable[KernelVariant]) -> None:
        when = "the kernel cache was frozen" if self.frozen else "a stream capture began" if _capturing() else ""
        if when:
            labels = ", ".join(variant.label for variant in missing)
            raise KernelMissingError(f"not compiled before {when}: {labels}; call KernelCache.precompile with it first")

    def _load(self, missing: Mapping[tuple[str, int | None], KernelVariant]) -> dict[Any, CompiledKernel]:
        loaded = {}
        for slot, variant in missing.items():
            if (kernel := self.store.load(slot[0], variant.source)) is not None:
                loaded[slot] = kernel
        self.loads += len(loaded)
        CACHE_STATS["loaded"] += len(loaded)
        return loaded

    def _compile(
        self, missing: Mapping[tuple[str, int | None], KernelVariant], target: Any, workers: int
    ) -> dict[Any, CompiledKernel]:
        if not missing:
            return {}
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="mjolnir-kernels-") as scratch, _triton_writes_to(scratch):
            with ThreadPoolExecutor(workers, "mjolnir-compile") as pool:
                kernels = list(pool.map(lambda variant: _compile(variant, target), missing.values()))
            for slot, kernel in zip(missing, kernels, strict=True):
                self.store.save(slot[0], kernel)
        seconds = time.perf_counter() - began
        self.compiles += len(kernels)
        self.compile_seconds += seconds
        CACHE_STATS["compiled"] += len(kernels)
        CACHE_STATS["compile_seconds"] += seconds
        return dict(zip(missing, kernels, strict=True))


def build_for(
    variants: Iterable[KernelVariant], target: Any, directory: Path, *, workers: int = 1
) -> list[CompiledKernel]:
    """Fill a kernel cache's directory ahead of time for an architecture, without a GPU.

    Args:
        variants: what to compile.
        target: a ``GPUTarget``, for example ``GPUTarget("cuda", 110, 32)``.
        directory: for `KernelCache`, there.
        workers: threads that compile.

    Raises:
        ConfigurationError: the directory can't be written.
    """
    cache = KernelCache(directory)
    kernels = cache.precompile(variants, target, workers=workers)
    if not cache.store.usable:
        raise ConfigurationError(f"kernel cache {directory}: accepted: a directory that can be written")
    return kernels


def launch(kernel: CompiledKernel, grid: Sequence[int], arguments: Sequence[Any], stream: int | None = None) -> None:
    """Launch on the current device.

    Args:
        kernel: from `KernelCache.get`.
        grid: one to three numbers of programs.
        arguments: the run-time arguments in order; pointers are tensors, addresses or None.
        stream: a CUDA stream's handle; None for the current one.

    Raises:
        ConfigurationError: not as many arguments as the variant has.
    """
    # Triton's launchers want a place for each constant, and skip what is there.
    constants = len(kernel.src.constants)
    if len(arguments) + constants != len(kernel.src.signature):
        wanted = len(kernel.src.signature) - constants
        raise ConfigurationError(f"{kernel.name}: {len(arguments)} arguments: accepted: {wanted}")
    places = (*arguments, *(None,) * constants)
    if stream is None:
        stream = driver.active.get_current_stream(driver.active.get_current_device())
    x, y, z = (*grid, 1, 1)[:3]
    run = kernel.run  # ahead of `kernel.function`, which it loads
    enter, leave = _hook(knobs.runtime.launch_enter_hook), _hook(knobs.runtime.launch_exit_hook)
    metadata = kernel.launch_metadata((x, y, z), stream, *places) if enter or leave else None
    run(x, y, z, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *places)


def _compile(variant: KernelVariant, target: Any) -> CompiledKernel:
    """Compile; of the intermediate forms only `KEPT` stays in memory, as after loading."""
    kernel = triton.compile(variant.source, target=target, options=variant.options)
    group = {name: path for name, path in kernel.metadata_group.items() if name.endswith(KEPT)}
    return CompiledKernel(kernel.src, group, kernel.hash)


@contextlib.contextmanager
def _triton_writes_to(directory: str) -> Iterator[None]:
    """Point Triton's cache elsewhere, without a trace in the environment that child processes inherit."""
    with knobs.cache.scope():
        propagate, knobs.propagate_env = knobs.propagate_env, False
        try:
            knobs.cache.dir = directory
            knobs.cache.manager_class = FileCacheManager
        finally:
            knobs.propagate_env = propagate
        yield


def _text(name: str, value: Any) -> str:
    """A constant as text that is the same in every process."""
    text = value.cache_key if hasattr(value, "cache_key") else repr(value)
    if " at 0x" in text:
        raise ConfigurationError(f"constant {name}={text}: accepted: a value whose repr tells all of it")
    return f"{name}={text}"


def _hook(chain: Any) -> Any:
    """A launch hook, or None where nobody has added one: building its argument costs more than the rest."""
    return chain if getattr(chain, "calls", chain) else None


def _capturing() -> bool:
    torch = sys.modules.get("torch")  # building ahead of time needs none
    return bool(torch and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
