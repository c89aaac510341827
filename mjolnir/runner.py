"""The interface between the vLLM side (builder, impl) and what executes T5 on a device.

One runner serves one builder: it owns the persistent plan buffers of that builder's attention group. A device
type gets a runner by an entry in ``_RUNNERS``; the builder asks `unavailable_reason` first, and keeps the group
on the fallback where there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mjolnir.errors import ConfigurationError
from mjolnir.planner import wave_slots

if TYPE_CHECKING:
    import torch

    from mjolnir.layouts import PagedKV

HEAD_SIZES = (64, 128, 256)
# Head sizes of packed pages by device: the CUDA kernel reads rows in vectors of 16 bytes.
PACKED_HEAD_SIZES = {"cpu": HEAD_SIZES, "cuda": (128, 256)}
PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class RunnerConfig:
    """Everything about an attention group that a runner is built, and its kernels are compiled, for.

    Attributes:
        num_heads: query heads on this rank.
        num_kv_heads: KV heads on this rank.
        head_size: elements of a head.
        page_size: tokens of a page, the kernel's block size.
        out_dtype: dtype of the output, the model's.
        max_num_seqs: most requests of a step.
        device: where the step runs.
        max_q_len: most query tokens of a request.
        q_dtype: ``bf16`` (as it comes, which costs nothing and is ten times as accurate: docs/kernels.md) or ``fp8``
            (quantised per sequence and KV head).
        kv_format: ``fp8`` (e4m3 bytes) or ``e2m3`` (packed rows of `mjolnir.reference.e2m3`).
        ctas_per_sm: programs that run side by side on one SM.
        max_splits: most pieces that one sequence is cut into.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    out_dtype: "torch.dtype"
    max_num_seqs: int
    device: "torch.device"
    max_q_len: int = 1
    q_dtype: str = "bf16"
    kv_format: str = "fp8"
    ctas_per_sm: int = 2
    max_splits: int = 16

    def __post_init__(self) -> None:
        """Check what every runner relies on.

        Raises:
            ConfigurationError: a shape that T5 does not take.
        """
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(f"{self.num_heads} query heads do not divide by {self.num_kv_heads} KV heads")
        if self.head_size not in HEAD_SIZES:
            raise ConfigurationError(f"head size {self.head_size}: accepted: {', '.join(map(str, HEAD_SIZES))}")
        if self.page_size not in PAGE_SIZES:
            raise ConfigurationError(f"page size {self.page_size}: accepted: {', '.join(map(str, PAGE_SIZES))}")

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def slots(self, q_len: int, num_sms: int) -> int:
        """Work items that fit one wave for a query length, on a device with ``num_sms`` SMs."""
        rows = q_len * self.heads_per_kv_head
        return wave_slots(self.num_kv_heads, -(-rows // query_tile_rows(rows)), num_sms, self.ctas_per_sm)


# A runner's plan of one step: each runner has its own type, opaque to everyone else.
DecodePlan = Any


class DecodeRunner(Protocol):
    """What executes T5 on one kind of device."""

    @property
    def config(self) -> RunnerConfig:
        """What the runner was built for."""

    def plan(self, seq_lens: "torch.Tensor", block_table: "torch.Tensor", *, q_len: int, causal: bool) -> DecodePlan:
        """Plan a step; called once a step, before its layers run.

        Args:
            seq_lens: (num_reqs,) int32, tokens of each sequence with the new ones, 0 for padding.
            block_table: (num_reqs, max_blocks) int32.
            q_len: query tokens of each request.
            causal: whether a query token sees only keys up to its own position.
        """

    def replan(self, plan: DecodePlan) -> None:
        """Bring a plan up to date with the sequence lengths it refers to, for the next fused draft step."""

    def run(
        self,
        plan: DecodePlan,
        query: "torch.Tensor",
        out: "torch.Tensor",
        kv: "PagedKV",
        k_scale: "torch.Tensor",
        v_scale: "torch.Tensor",
        softmax_scale: float,
        lse: "torch.Tensor | None" = None,
    ) -> None:
        """Attend: ``out = softmax(scale * Q K^T) V`` for one layer.

        Args:
            plan: what `plan` returned for this step.
            query: (>= num_reqs * q_len, num_heads, head_size), rows of a request one after the other.
            out: as ``query``, in the output dtype; rows beyond ``num_reqs * q_len`` stay untouched.
            kv: the layer's cache.
            k_scale: descale of K, float32: one element, (num_kv_heads,) or (num_reqs, num_kv_heads); with e2m3
                also (num_kv_heads, head_size), by channel.
            v_scale: descale of V, likewise.
            softmax_scale: factor of the scores, usually ``head_size ** -0.5``.
            lse: (num_reqs, num_kv_heads, q_len * heads_per_kv_head) float32 for the natural-log LSE, or None.
        """


def query_tile_rows(rows: int) -> int:
    """Query rows that one program takes: the power of two that holds them, between 16 and 32."""
    return 16 if rows <= 16 else 32


def _cpu_runner(config: RunnerConfig) -> DecodeRunner:
    from mjolnir.reference.executor import TorchRunner  # noqa: PLC0415  (imports torch)

    return TorchRunner(config)


def _cuda_runner(config: RunnerConfig) -> DecodeRunner:
    from mjolnir.kernels.stream_runner import StreamRunner  # noqa: PLC0415  (imports Triton)

    return StreamRunner(config)


_RUNNERS: dict[str, Callable[[RunnerConfig], DecodeRunner]] = {"cpu": _cpu_runner, "cuda": _cuda_runner}


def unavailable_reason(device_type: str, kv_format: str = "fp8", head_size: int | None = None) -> str | None:
    """Why T5 can't run on a kind of device, with a KV format and head size where given; None where it can."""
    if device_type not in _RUNNERS:
        return f"no T5 kernels for device type '{device_type}' in this build"
    sizes = PACKED_HEAD_SIZES[device_type]
    if kv_format == "e2m3" and head_size is not None and head_size not in sizes:
        return f"head_size {head_size} with fp6_e2m3 on {device_type} is not one of {', '.join(map(str, sizes))}"
    return None


def create_runner(config: RunnerConfig) -> DecodeRunner:
    """The runner for the configuration's device.

    Raises:
        ConfigurationError: there is none.
    """
    reason = unavailable_reason(config.device.type)
    if reason:
        raise ConfigurationError(reason)
    return _RUNNERS[config.device.type](config)
