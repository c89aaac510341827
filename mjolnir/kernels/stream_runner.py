"""T5 on CUDA devices: buffers and launches. See `mjolnir.runner.DecodeRunner` for the interface."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.driver import driver

from mjolnir.env import BackendSettings
from mjolnir.errors import ConfigurationError
from mjolnir.kernels.apart import compile_apart
from mjolnir.kernels.compiler import KernelCache, KernelVariant
from mjolnir.kernels.compiler import launch as launch_compiled
from mjolnir.kernels.tuning import StreamTuning
from mjolnir.kernels.variants import Choice, Strides, decode_variant, merge_variant, shape_of, siblings
from mjolnir.layouts import PagedKV
from mjolnir.runner import PACKED_HEAD_SIZES, RunnerConfig

ALIGNMENT = 16  # bytes; memory is read and written in vectors of as many
WORKERS = 4  # threads that compile

# Replaces compiling and launching: a variant, the grid, the run-time arguments.
Launch = Callable[[KernelVariant, tuple[int, ...], tuple[Any, ...]], None]


@dataclass(frozen=True)
class StreamPlan:
    """A step: vLLM's live tensors. There is nothing to plan: every program finds its share from ``seq_lens``.

    Attributes:
        q_len: query tokens of each request.
        causal: whether a query token sees only keys up to its own position.
        seq_lens: (num_seqs,) int32, live.
        block_table: (num_seqs, max_blocks) int32, live.
    """

    q_len: int
    causal: bool
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class StreamRunner:
    """T5 for CUDA devices.

    The first step with new strides compiles, or loads from the kernel cache, every variant that this runner can meet
    with them; after it no launch compiles. A first step inside a stream capture raises `KernelMissingError`.

    Attributes:
        config: what the runner was built for.
        shapes: by query length.
    """

    def __init__(
        self,
        config: RunnerConfig,
        *,
        num_sms: int | None = None,
        tuning: StreamTuning | None = None,
        cache: KernelCache | None = None,
        launch: Launch | None = None,
        ahead: bool = True,
    ) -> None:
        """Allocate buffers; nothing is compiled yet.

        Args:
            config: what the runner is for; Q must be ``bf16``.
            num_sms: SMs to fill; None for the device's.
            tuning: overrides the tuned configurations.
            cache: of compiled kernels; None for the process's.
            launch: replaces compiling and launching.
            ahead: compile everything at the first step; else each variant when it is first needed, for measurements.
        """
        if config.q_dtype != "bf16":
            raise ConfigurationError(
                f"Q dtype {config.q_dtype}: the CUDA kernels take bf16 (Q as it comes), which costs them no time"
            )
        packed_sizes = PACKED_HEAD_SIZES["cuda"]
        if config.kv_format == "e2m3" and config.head_size not in packed_sizes:
            raise ConfigurationError(f"e2m3 with head size {config.head_size}: accepted: {packed_sizes}")
        arch = "default"
        if config.device.type == "cuda":
            properties = torch.cuda.get_device_properties(config.device)
            arch = f"sm_{properties.major}{properties.minor}"
            num_sms = num_sms or properties.multi_processor_count
        if num_sms is None:
            raise ConfigurationError(f"device {config.device}: accepted: a CUDA device, or a number of SMs")
        self.config = config
        self.shapes = {n: shape_of(config, n, num_sms, arch, tuning) for n in range(1, config.max_q_len + 1)}
        self._ahead = ahead
        self._cache = cache
        self._launch = launch
        self._compiled: dict[Choice, tuple[Any, Any]] = {}
        pieces = max(2 * shape.programs * shape.rows for shape in self.shapes.values())
        pairs = max(config.num_kv_heads * shape.q_tiles for shape in self.shapes.values())
        device = {"device": config.device}
        self._part_o = torch.empty(pieces * config.head_size, dtype=torch.float16, **device)
        self._part_ml = torch.empty(2 * pieces, dtype=torch.float32, **device)
        self._arrived = torch.zeros(config.max_num_seqs * pairs, dtype=torch.int32, **device)

    def plan(self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, q_len: int, causal: bool) -> StreamPlan:
        """The step's tensors; nothing runs. With one query token both masks are one."""
        return StreamPlan(q_len, causal or q_len == 1, seq_lens, block_table)

    def replan(self, plan: StreamPlan) -> None:
        """Nothing to do: a launch works on the lengths as they are when it runs."""

    def run(
        self,
        plan: StreamPlan,
        query: torch.Tensor,
        out: torch.Tensor,
        kv: PagedKV,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        softmax_scale: float,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend, for one layer; see `mjolnir.runner.DecodeRunner.run`.

        With e2m3, descales of (num_kv_heads, head_size) elements are by channel. A query or an output that does not
        begin at a multiple of 16 bytes costs a copy.

        Raises:
            ConfigurationError: K or V cannot be read in vectors of 16 bytes.
            KernelMissingError: a stream is captured, and this needs a variant that was not compiled before.
        """
        if query.data_ptr() % ALIGNMENT:
            query = _aligned_like(query).copy_(query)
        if out.data_ptr() % ALIGNMENT:
            self.run(plan, query, aligned := _aligned_like(out), kv, k_scale, v_scale, softmax_scale, lse)
            out.copy_(aligned)
            return
        config, shape = self.config, self.shapes[plan.q_len]
        k, v = _words(kv.k, "K"), _words(kv.v, "V")
        if k.stride() != v.stride():
            raise ConfigurationError(f"K cache with strides {k.stride()} and V with {v.stride()}: accepted: the same")
        channels = config.kv_format == "e2m3" and k_scale.numel() == config.num_kv_heads * config.head_size
        num_seqs = plan.seq_lens.shape[0]
        choice = Choice(
            q_len=plan.q_len,
            causal=plan.causal,
            merge_here=shape.merge_here(num_seqs),
            write_lse=lse is not None,
            channel_scales=channels,
            q_dtype=query.dtype,
            strides=Strides(
                query.stride(0), query.stride(1), out.stride(0), out.stride(1), k.stride(0), k.stride(2), k.stride(1)
            ),
        )
        decode, merge = self._compiled.get(choice) or self._prepare(choice)
        if shape.tuning.kernel == "wgmma":
            k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
        scale_strides = (0, 0) if channels else _scale_strides(k_scale)
        lse = self._part_ml if lse is None else lse
        # grid: one program a stretch of the line of tiles
        self._start(
            decode,
            (shape.programs,),
            query,
            k,
            v,
            out,
            plan.block_table,
            plan.seq_lens,
            self._part_o,
            self._part_ml,
            self._arrived,
            lse,
            k_scale,
            v_scale,
            num_seqs,
            k.shape[0],
            softmax_scale,
            plan.block_table.stride(0),
            *scale_strides,
        )
        if choice.merge_here:
            return
        # grid: one program a query row
        self._start(
            merge,
            (shape.query_rows, config.num_kv_heads, num_seqs),
            out,
            plan.seq_lens,
            self._part_o,
            self._part_ml,
            lse,
            v_scale,
            num_seqs,
            shape.programs,
            *scale_strides,
        )

    def _start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        if self._launch is not None:
            self._launch(kernel, grid, arguments)
        else:
            launch_compiled(kernel, grid, arguments)

    def _prepare(self, choice: Choice) -> tuple[Any, Any]:
        """Compile everything that steps with these tensors can need."""
        choices = {choice, *siblings(choice, self.shapes)} if self._ahead else {choice}
        variants = []
        for each in choices:
            shape = self.shapes[each.q_len]
            variants += [decode_variant(shape, each), merge_variant(shape, each)]
        kernels: list[Any] = list(variants)
        if self._launch is None:
            kernels = (self._cache or process_cache()).precompile(variants, workers=WORKERS)
        pairs = zip(kernels[::2], kernels[1::2], strict=True)
        self._compiled |= dict(zip(choices, pairs, strict=True))
        return self._compiled[choice]


def variants_of(
    config: RunnerConfig,
    use: Callable[[StreamRunner], object],
    *,
    num_sms: int | None = None,
    tuning: StreamTuning | None = None,
) -> list[KernelVariant]:
    """The variants that ``use`` needs of a runner; nothing is compiled or launched."""
    variants: list[KernelVariant] = []

    def collect(variant: KernelVariant, _grid: tuple[int, ...], _arguments: tuple[Any, ...]) -> None:
        variants.append(variant)

    use(StreamRunner(config, num_sms=num_sms, tuning=tuning, launch=collect, ahead=False))
    return variants


@functools.cache
def process_cache() -> KernelCache:
    """The kernel cache of this process, in the directory that the environment names."""
    return KernelCache(BackendSettings.from_env().kernel_cache_directory)


def compile_for_device(variants: Sequence[KernelVariant]) -> None:
    """Compile or load many variants into the process's cache, on all cores."""
    cache = process_cache()
    compile_apart(variants, cache.store.directory, driver.active.get_current_target())
    cache.precompile(variants, workers=WORKERS)


def _aligned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own with the same strides, so that the same variants serve."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _words(cache: Any, name: str) -> torch.Tensor:
    """A (pages, page_size, kv_heads, row) view of bytes as one of 4-byte words."""
    strides = cache.stride()
    if cache.data_ptr() % ALIGNMENT or any(stride % ALIGNMENT for stride in strides[:3]) or strides[3] != 1:
        raise ConfigurationError(
            f"{name} cache at {cache.data_ptr():#x} with strides {strides} bytes: accepted: multiples of "
            f"{ALIGNMENT} bytes, rows without gaps"
        )
    words: torch.Tensor = cache.view(torch.int32)
    return words


def _scale_strides(scale: torch.Tensor) -> tuple[int, int]:
    """Strides of a descale of 1, (num_kv_heads,) or (num_seqs, num_kv_heads) elements over sequences and heads."""
    if scale.numel() == 1:
        return 0, 0
    return (scale.stride(0), scale.stride(1)) if scale.dim() == 2 else (0, scale.stride(0))
