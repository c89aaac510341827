"""Step classification: does T5 run this step, and if not, why not.

Pure: takes what the builder knows on the host about a batch, gives a decision. For a captured CUDA graph the
decision at capture and at every replay must be the same, so it may depend only on the number of requests, the
query lengths and the causal flag. A step that may be split is none of a captured graph: those are uniform.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mjolnir.names import FallbackReason, StepKind

# With fewer, two more launches a layer would save the fallback next to nothing. Not measured yet.
MIN_SPLIT_DECODES = 4


@dataclass(frozen=True)
class StepLimits:
    """What a builder's T5 runner is configured for.

    Attributes:
        max_q_len: most query tokens of a request.
        max_num_seqs: most requests of a step, padding included.
        noncausal: whether non-causal steps are taken.
        draft: whether the builder serves only a drafter's layers.
    """

    max_q_len: int
    max_num_seqs: int
    noncausal: bool = True
    draft: bool = False


@dataclass(frozen=True)
class Batch:
    """What is known on the host about a step, from vLLM's common attention metadata.

    Attributes:
        query_start_loc: shape (num_reqs + 1,), start of each request in the query tensor.
        max_query_len: the query length that vLLM announces; a captured graph is keyed by it.
        causal: the causal flag; None stands for a mask that differs between requests.
        is_prefilling: shape (num_reqs,), which requests are still reading their prompt; None if unknown.
        context_parallel: whether the KV cache of a request is spread over ranks.
        bidirectional_ranges: whether multimodal tokens see each other in both directions.
    """

    query_start_loc: npt.NDArray[np.integer]
    max_query_len: int
    causal: bool | None = True
    is_prefilling: npt.NDArray[np.bool_] | None = None
    context_parallel: bool = False
    bidirectional_ranges: bool = False


@dataclass(frozen=True)
class T5Step:
    """A step that runs on T5: every request has ``q_len`` query tokens, trailing padding requests none."""

    q_len: int
    kind: StepKind


@dataclass(frozen=True)
class FallbackStep:
    """A step that runs on the fallback, and the first reason why."""

    reason: FallbackReason


@dataclass(frozen=True)
class SplitStep:
    """A step of which the first ``num_decodes`` requests, of ``q_len`` query tokens each, run on T5."""

    q_len: int
    num_decodes: int


def classify(batch: Batch, limits: StepLimits) -> T5Step | FallbackStep:
    """Decide who runs a step."""
    query_lens = np.diff(batch.query_start_loc)
    q_len = batch.max_query_len
    if not 1 <= q_len <= limits.max_q_len or not len(query_lens):
        return FallbackStep(_length_reason(query_lens, batch.is_prefilling))
    if len(query_lens) > limits.max_num_seqs:
        return FallbackStep(FallbackReason.BATCH)
    if batch.causal is None or (batch.causal is False and not limits.noncausal):
        return FallbackStep(FallbackReason.CAUSAL_TENSOR)
    if batch.bidirectional_ranges and q_len > 1:
        return FallbackStep(FallbackReason.CAUSAL_TENSOR)
    if batch.context_parallel:
        return FallbackStep(FallbackReason.CONTEXT_PARALLEL)
    if not _is_uniform(query_lens, q_len):
        return FallbackStep(_length_reason(query_lens, batch.is_prefilling))
    return T5Step(q_len, _kind(q_len, batch.causal, limits.draft))


def split(batch: Batch, limits: StepLimits) -> SplitStep | None:
    """How a step that T5 does not take as a whole is split; None where it is the fallback's altogether.

    vLLM puts decodes first. The longest run of leading requests with the same number of query tokens is T5's. A mask
    that T5 would refuse anywhere in the step, a drafter's step and one with too few decodes are not split.
    """
    query_lens = np.diff(batch.query_start_loc)
    if batch.causal is not True or batch.bidirectional_ranges or batch.context_parallel or limits.draft:
        return None
    if not MIN_SPLIT_DECODES < len(query_lens) <= limits.max_num_seqs:
        return None
    q_len = int(query_lens[0])
    others = np.flatnonzero(query_lens != q_len)
    num_decodes = int(others[0]) if len(others) else len(query_lens)
    if not 1 <= q_len <= limits.max_q_len or num_decodes < MIN_SPLIT_DECODES or not query_lens[num_decodes:].any():
        return None
    return SplitStep(q_len, num_decodes)


def _is_uniform(query_lens: npt.NDArray[np.integer], q_len: int) -> bool:
    """Whether the leading requests all have ``q_len`` tokens and every later one is padding.

    Padding between requests would match query rows to the wrong sequences.
    """
    requests = int(np.count_nonzero(query_lens))
    return bool((query_lens[:requests] == q_len).all())


def _length_reason(query_lens: npt.NDArray[np.integer], is_prefilling: npt.NDArray[np.bool_] | None) -> FallbackReason:
    """Name why the query lengths do not fit: prompts, prompts beside decodes, or odd decodes."""
    live = query_lens > 0
    if is_prefilling is not None:
        flags = is_prefilling[: len(query_lens)]  # without the padding that a captured graph has
        prefilling = flags & live[: len(flags)]
        if prefilling.any():
            return FallbackReason.PREFILL if prefilling.sum() == live.sum() else FallbackReason.MIXED
    lengths = query_lens[: int(np.count_nonzero(live))]  # padding amid requests is odd too
    return FallbackReason.Q_LEN if len(set(lengths.tolist())) <= 1 else FallbackReason.NON_UNIFORM


def _kind(q_len: int, causal: bool, draft: bool) -> StepKind:
    if not causal and q_len > 1:
        return StepKind.NONCAUSAL
    if draft:
        return StepKind.DRAFT
    return StepKind.DECODE if q_len == 1 else StepKind.VERIFY
