"""A step in two parts: some requests of vLLM's common metadata alone, and metadata of both parts together.

Nothing here reads from the device, and nothing pokes into the fallback's metadata: its builder makes it anew, for the
requests that are its own.
"""

from typing import Any

import torch

from mjolnir.metadata import MjolnirMetadata, SplitMetadata

# What common metadata has one of for each request.
_PER_REQUEST = ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound", "rswa_prefix_lens")
_OPTIONAL_PER_REQUEST = ("req_idx", "replayssm_decode_base_cpu")


def requests_of(cam: Any, first: int, last: int) -> Any:
    """Common metadata of the requests ``[first, last)`` of a step alone; nothing of it is waited for on the host."""
    starts = cam.query_start_loc_cpu[first : last + 1]
    begin, end = int(starts[0]), int(starts[-1])
    query_lens = starts.diff()
    ranges = cam.mm_req_doc_ranges
    changes: dict[str, Any] = {
        "query_start_loc": cam.query_start_loc[first : last + 1] - begin,
        "query_start_loc_cpu": starts - begin,
        "num_reqs": last - first,
        "num_actual_tokens": end - begin,
        "max_query_len": int(query_lens.max()),
        "slot_mapping": cam.slot_mapping[begin:end],
        "positions": None if cam.positions is None else cam.positions[begin:end],
        "mm_req_doc_ranges": ranges and {key - first: each for key, each in ranges.items() if first <= key < last},
        "_num_computed_tokens_cache": None,
        "_token_to_req_indices_cache": None,
    }
    for name in (*_PER_REQUEST, *(name for name in _OPTIONAL_PER_REQUEST if hasattr(cam, name))):
        value = getattr(cam, name)
        changes[name] = None if value is None else value[first:last]
    if first:
        # In memory of their own, whose start is aligned: Triton compiles a kernel again for a pointer that is not.
        for name in ("seq_lens", "block_table_tensor"):
            changes[name] = changes[name].clone()
    if cam.seq_lens_cpu_upper_bound is not None:
        # A kernel's grid may follow from it, and the longest sequence may be in the other part.
        changes["max_seq_len"] = min(cam.max_seq_len, int(changes["seq_lens_cpu_upper_bound"].max()))
    if isinstance(cam.causal, torch.Tensor):
        changes["causal"] = cam.causal[first:last]
    return cam.replace(**changes)


def joined(cam: Any, head: MjolnirMetadata, tail_tokens: int, tail: Any) -> SplitMetadata:
    """Metadata of a whole step from that of its parts.

    Args:
        cam: vLLM's common metadata of the step.
        head: of its first requests.
        tail_tokens: query tokens of the others.
        tail: the fallback's metadata of the others.
    """
    return SplitMetadata(
        head=head,
        tail=tail,
        tail_tokens=tail_tokens,
        num_actual_tokens=cam.num_actual_tokens,
        num_reqs=cam.num_reqs,
        max_query_len=cam.max_query_len,
        max_seq_len=cam.max_seq_len,
        query_start_loc=cam.query_start_loc,
        seq_lens=cam.seq_lens,
        block_table=cam.block_table_tensor,
        slot_mapping=cam.slot_mapping,
        num_decodes=head.num_reqs,
        num_decode_tokens=head.num_actual_tokens,
        num_prefills=cam.num_reqs - head.num_reqs,
        num_prefill_tokens=tail_tokens,
    )
