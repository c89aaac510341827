"""Names shared by the engine's side (who counts) and the supervisor's side (who exports)."""

from enum import StrEnum

STATS_DIR_VARIABLE = "MJOLNIR_STATS_DIR"
DEFAULT_STATS_DIR = "/dev/shm/mjolnir"  # noqa: S108  (created with mode 0700, files with 0600)


class StepKind(StrEnum):
    """What a step that ran on T5 was: label ``kind`` of ``mjolnir_t5_steps_total``."""

    DECODE = "decode"  # one query token a request
    VERIFY = "verify"  # the same number, above one, of causal query tokens a request
    NONCAUSAL = "noncausal"  # a parallel drafter's block: every query token sees every key
    DRAFT = "draft"  # a decode step of a drafter model
    SPLIT = "split"  # a step of which the leading decodes ran on T5, and the rest on the fallback


class FallbackReason(StrEnum):
    """Why a step ran on the fallback: label ``reason`` of ``mjolnir_fallback_steps_total``."""

    PREFILL = "prefill"  # every request of the step is still reading its prompt
    MIXED = "mixed"  # prompts and decodes in one step
    Q_LEN = "q_len"  # decodes with more query tokens than T5 is configured for
    NON_UNIFORM = "non_uniform"  # decodes whose numbers of query tokens differ
    CAUSAL_TENSOR = "causal_tensor"  # the mask differs between requests or tokens
    BATCH = "batch"  # more requests than T5 has buffers for
    CONTEXT_PARALLEL = "context_parallel"  # the KV cache of a request is spread over ranks
    DRAFT = "draft"  # a drafter that was asked to stay on the fallback
    INELIGIBLE = "ineligible"  # the attention group can't run on T5 at all; see mjolnir_group_info
    DISABLED = "disabled"  # MJOLNIR_ATTN_DISABLE is set


class KernelSource(StrEnum):
    """Where a T5 kernel variant came from: label ``source`` of ``mjolnir_kernels_total``."""

    COMPILED = "compiled"
    LOADED = "loaded"


KV_SCALES_VARIABLE = "MJOLNIR_KV_SCALES"
FP8_KV_DTYPES = ("fp8", "fp8_e4m3")
FP6_KV_DTYPE = "fp6_e2m3"  # `--kv-cache-dtype` of packed 6-bit pages
