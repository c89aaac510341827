"""Attention metadata of a step that runs on T5, or in part."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from mjolnir.runner import DecodePlan, DecodeRunner


@dataclass
class MjolnirMetadata:
    """What vLLM and our impl read of a T5 step.

    A plain dataclass, not frozen and without slots: vLLM's wrappers copy its fields into subclasses and set
    attributes of their own on it. The tensors are vLLM's persistent buffers, never copies, so that a captured
    graph sees the data of the step it replays.

    Attributes:
        plan: the split-KV plan, made by ``runner``.
        runner: the T5 runner of the builder that made this object.
        num_actual_tokens: query tokens of the step.
        num_reqs: requests, padding included.
        max_query_len: query tokens of each request.
        max_seq_len: longest sequence, or an upper bound.
        query_start_loc: (num_reqs + 1,) int32, start of each request in the query tensor.
        seq_lens: (num_reqs,) int32, tokens of each sequence with the new ones.
        block_table: (num_reqs, max_blocks) int32, pages of each sequence.
        slot_mapping: (num_actual_tokens,) int64, cache slot of each new token, -1 for padding.
        causal: whether a query token sees only keys up to its own position.
    """

    plan: "DecodePlan"
    runner: "DecodeRunner"
    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: "torch.Tensor"
    seq_lens: "torch.Tensor"
    block_table: "torch.Tensor"
    slot_mapping: "torch.Tensor"
    causal: bool = True
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    use_cascade: bool = False

    is_t5: ClassVar[bool] = True


@dataclass
class SplitMetadata:
    """A step whose first requests run on T5 and the others on the fallback; never part of a captured graph.

    Besides its two parts it has what vLLM's own code reads of any metadata, of the whole step.

    Attributes:
        head: the requests on T5.
        tail: the fallback's own metadata of the others, whose requests and tokens count from 0.
        tail_tokens: query tokens of the tail; they follow the head's.
        num_actual_tokens: query tokens of the step, padding included.
        num_reqs: requests, padding included.
        max_query_len: most query tokens of a request.
        max_seq_len: longest sequence, or an upper bound.
        query_start_loc: (num_reqs + 1,) int32, start of each request in the query tensor.
        seq_lens: (num_reqs,) int32, tokens of each sequence with the new ones.
        block_table: (num_reqs, max_blocks) int32, pages of each sequence.
        slot_mapping: (num_actual_tokens,) int64, cache slot of each new token, -1 for padding.
    """

    head: MjolnirMetadata
    tail: Any
    tail_tokens: int
    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: "torch.Tensor"
    seq_lens: "torch.Tensor"
    block_table: "torch.Tensor"
    slot_mapping: "torch.Tensor"
    causal: bool = True
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    use_cascade: bool = False
