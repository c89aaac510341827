"""The metadata builder: once a step and attention group it decides who runs the step, and counts the decision."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mjolnir import banner, packed, selftest, split, steps, telemetry, tensor_scales
from mjolnir.counters import GroupInfo
from mjolnir.eligibility import ineligible_reason, kv_format
from mjolnir.env import BackendSettings
from mjolnir.metadata import MjolnirMetadata, SplitMetadata
from mjolnir.names import FallbackReason
from mjolnir.runner import PAGE_SIZES, DecodeRunner, RunnerConfig, create_runner
from mjolnir.steps import Batch, FallbackStep, SplitStep, StepLimits, T5Step, classify

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder
else:
    AttentionMetadataBuilder = object

logger = logging.getLogger("vllm.mjolnir")


class BuilderMixin(AttentionMetadataBuilder):
    """What Mjolnir changes in its fallback's metadata builder.

    vLLM makes every builder twice (once to measure CUDA graph memory) and more often under micro-batching, so
    nothing here is kept outside of the object but the group's line in the counters file.
    """

    # Metadata shared between groups would bypass the plan.
    supports_update_block_table = False
    fallback_name: str
    reorder_batch_threshold: int | None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.packed = packed.is_packed(kv_cache_spec)
        self._page_size = kv_cache_spec.block_size
        seen = packed.expanded_spec(kv_cache_spec, vllm_config.model_config.dtype) if self.packed else kv_cache_spec
        super().__init__(seen, layer_names, vllm_config, device, *args, **kwargs)
        self.settings = BackendSettings.from_env()
        self._capturing = self._warm = False
        if self.settings.banner:
            banner.show_once(self.settings.config_name)
        if not self.settings.fused_draft:
            self.supports_draft_decode_metadata_update = False
        layers = attention_layers(vllm_config, layer_names)
        self.is_draft = _is_draft(layers)
        self._tensor_scales = tensor_scales.of_group(vllm_config, layers)
        reason = ineligible_reason(kv_cache_spec, layers, vllm_config, device.type, self.settings)
        self.fixed_reason = _fixed_reason(reason, self.settings, self.is_draft)
        self.runner: DecodeRunner | None = None
        if self.fixed_reason is None:
            config = _runner_config(kv_cache_spec, layers or {}, vllm_config, device, self.settings, self.is_draft)
            runner = create_runner(config)
            reason = self._tested(runner)
        elif reason is None:
            reason = "MJOLNIR_ATTN_DRAFT_T5 is off"
        self._promise(kv_cache_spec)
        self._announce(kv_cache_spec, reason or "")

    def _tested(self, runner: DecodeRunner) -> str:
        """Take a runner into use if it passes its self-test; else say why not, and leave the group on the fallback."""
        outcome = selftest.run(runner, _token_major(self.vllm_config))
        group = group_label(self.layer_names)
        if outcome.failure:
            self.fixed_reason = FallbackReason.INELIGIBLE
            logger.error("Mjolnir: T5 is OFF for %s: %s. Decoding goes on without it.", group, outcome.failure)
            return outcome.failure
        logger.info(
            "Mjolnir self-test of %s: %d steps, relative error at most %.2g, %.2f s, and %.2f s of compiling",
            group,
            outcome.steps,
            outcome.error,
            outcome.seconds,
            outcome.compiling,
        )
        config = runner.config
        self.limits = StepLimits(config.max_q_len, config.max_num_seqs, self.settings.noncausal, self.is_draft)
        self.runner = runner
        if self.settings.split_mixed and not self.is_draft and self.reorder_batch_threshold is None:
            self.reorder_batch_threshold = config.max_q_len  # Model Runner V1 leaves the order alone otherwise
        return ""

    def _promise(self, spec: Any) -> None:
        """Answer what this group can be captured as, now that its layers are known, which the class does not know."""
        if self.fixed_reason is None:
            base = self._fallback_cudagraph_support(self.vllm_config, spec)
            promise = _t5_cudagraph_support(self.vllm_config, self.settings, base)
            self.get_cudagraph_support = lambda vllm_config, kv_cache_spec: promise  # type: ignore[method-assign]
            return
        self.get_cudagraph_support = self._fallback_cudagraph_support  # type: ignore[method-assign]
        if self.packed:
            self.supports_draft_decode_metadata_update = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """What groups of a kind of page can be captured as; never more than is true for every step of them.

        Where T5 runs: uniform batches, since the grid is fixed for a query length. Not ALWAYS, even over a
        fallback that could: at replay a uniform step would be T5's, and the captured fallback kernels would find
        their own persistent state stale. Where T5 does not run: the fallback's own answer.
        """
        base = cls._fallback_cudagraph_support(vllm_config, kv_cache_spec)
        settings = BackendSettings.from_env()
        device_type = vllm_config.device_config.device_type
        spec = _kernel_spec(kv_cache_spec)
        if ineligible_reason(spec, {}, vllm_config, device_type, settings) is not None:
            return base
        # Which layers are in the group is not known here, so one that T5 can't run speaks for all.
        layers = dict(vllm_config.compilation_config.static_forward_context)
        layers = {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}
        if ineligible_reason(spec, layers, vllm_config, device_type, settings) is not None:
            return _weaker(base, type(base).UNIFORM_BATCH)
        return _t5_cudagraph_support(vllm_config, settings, base)

    @classmethod
    def _fallback_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """What a group can be captured as whose steps may be the fallback's; over packed pages never anything."""
        base = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return type(base).NEVER if packed.is_packed(kv_cache_spec) else base

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """None: a captured T5 step has one query length."""
        return None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Metadata of one step, for T5 or for the fallback; the decision is counted."""
        if self._tensor_scales is not None:
            self._tensor_scales.put()
        step = self._decide(common_prefix_len, common_attn_metadata)
        if not self._capturing:
            telemetry.count_kernels()
            if self._serving():
                self._count(step, common_attn_metadata)
        if isinstance(step, T5Step):
            return self._t5_metadata(common_attn_metadata, step)
        build = functools.partial(super().build, common_prefix_len, fast_build=fast_build)
        if self.packed:
            longest = self.vllm_config.model_config.max_model_len
            build = functools.partial(
                packed.expanded_metadata, page_size=self._page_size, max_model_len=longest, build=build
            )
        if isinstance(step, FallbackStep):
            return build(common_attn_metadata)
        return self._split_metadata(common_attn_metadata, step, build)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata for a capture: classified as every replay of it will be, and not counted."""
        # Some fallbacks capture by their own build_for_cudagraph_capture, others by calling build again.
        self._capturing = True
        try:
            step = self._classify(common_attn_metadata)
            if isinstance(step, T5Step):
                return self._t5_metadata(common_attn_metadata, step)
            if self.packed:
                raise RuntimeError("a fallback step over fp6_e2m3 can't be captured; report this")
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Bring a draft step's metadata up to date on the device; recorded inside the draft graph."""
        if isinstance(metadata, SplitMetadata):
            raise RuntimeError("a split step reached a captured draft; set MJOLNIR_ATTN_SPLIT_MIXED=0 and report this")
        if isinstance(metadata, MjolnirMetadata):
            metadata.runner.replan(metadata.plan)
        else:
            super().update_draft_decode_metadata(metadata)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never: T5 has no shared-prefix pass."""
        return False

    def _classify(self, cam: Any) -> T5Step | FallbackStep:
        if self.fixed_reason is not None:
            return FallbackStep(self.fixed_reason)
        return classify(_batch(cam), self.limits)

    def _decide(self, common_prefix_len: int, cam: Any) -> T5Step | SplitStep | FallbackStep:
        """Who runs a step that is not captured: what a capture would say, but that a step of both may be split."""
        step = self._classify(cam)
        if isinstance(step, T5Step) or self.runner is None or not self.settings.split_mixed:
            return step
        if self._capturing or common_prefix_len:
            return step
        return steps.split(_batch(cam), self.limits) or step

    def _serving(self) -> bool:
        """Whether steps are users'.

        vLLM's GPU worker warms up and captures with steps like any other. That it is done shows only in that it begins
        to watch for late compilations, unless it was told not to warm up at all.
        """
        if self._warm or self.device.type != "cuda" or not self.vllm_config.kernel_config.enable_jit_warmup:
            return True
        from vllm.utils import jit_monitor  # noqa: PLC0415

        self._warm = jit_monitor.is_active()
        return self._warm

    def _count(self, step: T5Step | SplitStep | FallbackStep, cam: Any) -> None:
        counters = telemetry.process_counters()
        tokens = int(cam.query_start_loc_cpu[cam.num_reqs])
        if isinstance(step, T5Step):
            counters.t5_step(step.kind, tokens)
        elif isinstance(step, SplitStep):
            head = step.num_decodes * step.q_len
            counters.split_step(head, tokens - head)
        else:
            counters.fallback_step(step.reason, tokens)

    def _split_metadata(self, cam: Any, step: SplitStep, build: Callable[[Any], Any]) -> SplitMetadata:
        head = split.requests_of(cam, 0, step.num_decodes)
        tail = split.requests_of(cam, step.num_decodes, cam.num_reqs)
        return split.joined(cam, self._t5_metadata(head, step), tail.num_actual_tokens, build(tail))

    def _t5_metadata(self, cam: Any, step: T5Step | SplitStep) -> MjolnirMetadata:
        assert self.runner is not None  # noqa: S101  (T5 steps exist only where there is one)
        causal = step.q_len == 1 or bool(cam.causal)
        seq_lens, block_table = cam.seq_lens[: cam.num_reqs], cam.block_table_tensor[: cam.num_reqs]
        return MjolnirMetadata(
            plan=self.runner.plan(seq_lens, block_table, q_len=step.q_len, causal=causal),
            runner=self.runner,
            num_actual_tokens=cam.num_actual_tokens,
            num_reqs=cam.num_reqs,
            max_query_len=cam.max_query_len,
            max_seq_len=cam.max_seq_len,
            query_start_loc=cam.query_start_loc,
            seq_lens=cam.seq_lens,
            block_table=cam.block_table_tensor,
            slot_mapping=cam.slot_mapping,
            causal=bool(cam.causal),
            num_decodes=cam.num_reqs,
            num_decode_tokens=cam.num_actual_tokens,
        )

    def _announce(self, spec: Any, reason: str) -> None:
        """Log who runs this group's decode steps, and show it in the counters file."""
        group = group_label(self.layer_names)
        kv_format = self.vllm_config.cache_config.cache_dtype
        telemetry.publish_group(
            GroupInfo(group, kv_format, spec.head_size, spec.block_size, self.fallback_name, reason)
        )
        if self.runner is None:
            log = logger.info if self.fixed_reason is FallbackReason.DRAFT else logger.warning
            log("Mjolnir decode disabled for %s: %s -> %s for all steps", group, reason, self.fallback_name)
            return
        config = self.runner.config
        logger.info(
            "Mjolnir decode enabled for %s: h_q=%d h_k=%d d=%d page=%d q_len<=%d Q=%s ctas/SM=%d max_splits=%d "
            "kv=%s device=%s fallback=%s",
            group,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.page_size,
            config.max_q_len,
            config.q_dtype,
            config.ctas_per_sm,
            config.max_splits,
            config.kv_format,
            config.device.type,
            self.fallback_name,
        )


def attention_layers(vllm_config: Any, layer_names: Sequence[str]) -> dict[str, Any] | None:
    """The attention layers of a group by name; None where this vLLM has no way to look (all of) them up."""
    try:
        from vllm.config import get_layers_from_vllm_config  # noqa: PLC0415
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415
    except ImportError:
        return None
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    return layers if len(layers) == len(layer_names) else None  # vLLM passes over names that it does not know


def group_label(layer_names: Sequence[str]) -> str:
    """A short name for a group of layers: the first in natural order, and how many there are."""

    def natural(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    first = min(layer_names, key=natural)
    return first if len(layer_names) == 1 else f"{first} ({len(layer_names)} layers)"


def _kernel_spec(spec: Any) -> Any:
    """A spec with a kernel's pages, where a page of the cache is several of these, as in hybrid models."""
    sizes = [size for size in PAGE_SIZES if spec.block_size % size == 0]
    if spec.block_size in PAGE_SIZES or not sizes:
        return spec
    return dataclasses.replace(spec, block_size=max(sizes))


def _t5_cudagraph_support(vllm_config: Any, settings: BackendSettings, base: Any) -> Any:
    """What a group on T5 can be captured as, over a fallback that can be captured as ``base``."""
    wanted = _num_speculative_tokens(vllm_config) + 1
    if 0 < settings.max_q_len < wanted or (not settings.noncausal and _parallel_drafting(vllm_config)):
        return _weaker(base, type(base).UNIFORM_BATCH)  # the steps that speculation is about are the fallback's
    return type(base).UNIFORM_BATCH


def _weaker(first: Any, second: Any) -> Any:
    return min(first, second, key=lambda support: support.value)


def _token_major(vllm_config: Any) -> bool:
    """Whether pages hold all heads of a token side by side; vLLM's default, and its choice where none is resolved."""
    layout = str(getattr(vllm_config.cache_config, "kv_cache_layout", None) or "LBNHC")
    return layout.index("N") < layout.index("H")


def _is_draft(layers: Mapping[str, Any] | None) -> bool:
    """Whether a group serves a drafter alone; the target's group may hold draft layers beside its own."""
    return (
        layers is not None
        and bool(layers)
        and all(getattr(layer, "is_draft_layer", False) for layer in layers.values())
    )


def _fixed_reason(reason: str | None, settings: BackendSettings, is_draft: bool) -> FallbackReason | None:
    """Why every step of a builder runs on the fallback, or None where that is decided step by step."""
    if settings.disabled:
        return FallbackReason.DISABLED
    if reason is not None:
        return FallbackReason.INELIGIBLE
    if is_draft and not settings.draft_t5:
        return FallbackReason.DRAFT
    return None


def _batch(cam: Any) -> Batch:
    """What the classifier needs of vLLM's common metadata."""
    prefilling = cam.is_prefilling
    # On the host in vLLM 0.32.0. A device tensor would cost a synchronisation for the sake of a label.
    on_host = prefilling is not None and prefilling.device.type == "cpu"
    return Batch(
        query_start_loc=cam.query_start_loc_cpu[: cam.num_reqs + 1].numpy(),
        max_query_len=cam.max_query_len,
        causal=cam.causal if isinstance(cam.causal, bool) and cam.rswa_prefix_lens is None else None,
        is_prefilling=prefilling.numpy() if on_host else None,
        context_parallel=cam.dcp_local_seq_lens is not None,
        bidirectional_ranges=bool(cam.mm_req_doc_ranges),
    )


def _runner_config(
    spec: Any,
    layers: Mapping[str, Any],
    vllm_config: Any,
    device: torch.device,
    settings: BackendSettings,
    is_draft: bool,
) -> RunnerConfig:
    max_q_len = _num_speculative_tokens(vllm_config) + 1
    if is_draft and getattr(vllm_config.speculative_config, "method", "") == "draft_model":
        max_q_len += 1  # the first of its steps takes what the target took, and the token that the target chose
    return RunnerConfig(
        num_heads=next(iter(layers.values())).num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        page_size=spec.block_size,
        out_dtype=vllm_config.model_config.dtype,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        device=device,
        max_q_len=min(max_q_len, settings.max_q_len) if settings.max_q_len else max_q_len,
        q_dtype=settings.q_dtype,
        kv_format=kv_format(vllm_config),
        ctas_per_sm=settings.ctas_per_sm,
        max_splits=settings.max_splits,
    )


def _num_speculative_tokens(vllm_config: Any) -> int:
    speculative = vllm_config.speculative_config
    return (speculative.num_speculative_tokens or 0) if speculative is not None else 0


def _parallel_drafting(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(getattr(speculative, "parallel_drafting", False))
