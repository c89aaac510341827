"""T5 on a device: buffers and launches. See `mjolnir.runner.DecodeRunner` for the interface."""

from dataclasses import dataclass

import torch
import triton

from mjolnir.errors import ConfigurationError
from mjolnir.kernels.decode import decode_kernel
from mjolnir.kernels.merge import merge_kernel
from mjolnir.kernels.plan import plan_kernel
from mjolnir.kernels.tuning import DecodeTuning, decode_tuning
from mjolnir.layouts import PagedKV
from mjolnir.runner import RunnerConfig

MERGE_CHUNK = 32
PLAN_CHUNK = 16
MAX_ROWS = 64


@dataclass(frozen=True)
class TritonPlan:
    """A step's plan: vLLM's live tensors, and the runner's buffers that the plan kernel filled from them.

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

    @property
    def num_seqs(self) -> int:
        """Requests of the step."""
        return int(self.seq_lens.shape[0])


class TritonRunner:
    """T5 for CUDA devices, and for Triton's interpreter on a CPU."""

    def __init__(self, config: RunnerConfig, *, num_sms: int | None = None, tuning: DecodeTuning | None = None) -> None:
        if config.q_dtype != "bf16":
            raise ConfigurationError(f"Q dtype {config.q_dtype}: the Triton kernels take bf16 (as it comes)")
        self.config = config
        self.tuning = tuning or decode_tuning(config.head_size)
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(config.device).multi_processor_count
        self.programs = num_sms * self.tuning.programs_per_sm
        rows = max(self._rows(q_len) for q_len in range(1, config.max_q_len + 1))
        integers = {"dtype": torch.int32, "device": config.device}
        floats = {"dtype": torch.float32, "device": config.device}
        self._cum_tiles = torch.zeros(config.max_num_seqs + 1, **integers)
        self._work = torch.zeros((self.programs, 4), **integers)
        self._part_o = torch.empty((2 * self.programs, rows, config.head_size), **floats)
        self._part_ml = torch.empty((2 * self.programs, 2, rows), **floats)

    def plan(self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, q_len: int, causal: bool) -> TritonPlan:
        """Plan a step on the device, from the live sequence lengths."""
        plan = TritonPlan(q_len, causal, seq_lens, block_table)
        self.replan(plan)
        return plan

    def replan(self, plan: TritonPlan) -> None:
        """Plan again from the sequence lengths as they are now; may be captured in a graph."""
        # grid: one program a chunk of stretches
        plan_kernel[(-(-self.programs // PLAN_CHUNK),)](
            plan.seq_lens,
            self._cum_tiles,
            self._work,
            plan.num_seqs,
            self.programs,
            PAIRS_PER_SEQ=self.config.num_kv_heads * self._q_tiles(plan.q_len),
            TILE=self.tuning.tile,
            MAX_SEQS=triton.next_power_of_2(self.config.max_num_seqs),
            CHUNK=PLAN_CHUNK,
            num_warps=4,
        )

    def run(
        self,
        plan: TritonPlan,
        query: torch.Tensor,
        out: torch.Tensor,
        kv: PagedKV,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        softmax_scale: float,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend, for one layer; see `mjolnir.runner.DecodeRunner.run`."""
        config, tuning = self.config, self.tuning
        k, v = _as_float8(kv.k), _as_float8(kv.v)
        scale_strides = _scale_strides(k_scale)
        shape = {
            "KV_HEADS": config.num_kv_heads,
            "GROUP": config.heads_per_kv_head,
            "Q_LEN": plan.q_len,
            "Q_TILES": self._q_tiles(plan.q_len),
            "ROWS": self._rows(plan.q_len),
            "D": config.head_size,
            "OUT_TOKEN_STRIDE": out.stride(0),
            "OUT_HEAD_STRIDE": out.stride(1),
            "WRITE_LSE": lse is not None,
        }
        # grid: one program a stretch of the line of tiles
        decode_kernel[(self.programs,)](
            query,
            k,
            v,
            out,
            plan.block_table,
            plan.seq_lens,
            self._work,
            self._part_o,
            self._part_ml,
            lse if lse is not None else self._part_ml,
            k_scale,
            v_scale,
            k.shape[0],
            softmax_scale,
            plan.block_table.stride(0),
            *scale_strides,
            Q_TOKEN_STRIDE=query.stride(0),
            Q_HEAD_STRIDE=query.stride(1),
            PAGE_STRIDE=k.stride(0),
            HEAD_STRIDE=k.stride(2),
            TOKEN_STRIDE=k.stride(1),
            PAGE=config.page_size,
            TILE=tuning.tile,
            CAUSAL=plan.causal,
            STAGES=tuning.stages,
            num_warps=tuning.warps,
            **shape,
        )
        # grid: one program a query row
        merge_kernel[(plan.q_len * config.heads_per_kv_head, config.num_kv_heads, plan.num_seqs)](
            out,
            self._cum_tiles,
            self._part_o,
            self._part_ml,
            lse if lse is not None else self._part_ml,
            plan.num_seqs,
            self.programs,
            CHUNK=MERGE_CHUNK,
            num_warps=4,
            **shape,
        )

    def _rows(self, q_len: int) -> int:
        """Query rows of a tile: the power of two that holds them all, from 16 to `MAX_ROWS`."""
        rows: int = triton.next_power_of_2(q_len * self.config.heads_per_kv_head)
        return min(MAX_ROWS, max(16, rows))

    def _q_tiles(self, q_len: int) -> int:
        return -(-q_len * self.config.heads_per_kv_head // self._rows(q_len))


def _as_float8(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


def _scale_strides(scale: torch.Tensor) -> tuple[int, int]:
    """Strides of a descale of 1, (num_kv_heads,) or (num_seqs, num_kv_heads) elements over sequences and heads."""
    if scale.numel() == 1:
        return 0, 0
    return (scale.stride(0), scale.stride(1)) if scale.dim() == 2 else (0, scale.stride(0))
