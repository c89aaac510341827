"""Attention of any step over a paged KV cache with PyTorch operations: the fallback's arithmetic on a CPU.

Prefill, chunked prefill and mixed steps, any head size, e4m3 or float pages. One request after the other: a
prompt's work is in its matrix products, not in the loop over requests.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from mjolnir.reference import e4m3


@dataclass(frozen=True)
class MaskRules:
    """What, besides causality, decides which keys count and how much.

    Attributes:
        sliding_window: keys a query token sees, its own included; None for all.
        soft_cap: scores become ``cap * tanh(score / cap)``; None for no cap.
        alibi_slopes: (num_heads,) float32, penalty per token of distance; None for none.
        sinks: (num_heads,) scores of a key without a value, which only takes weight; None for none.
    """

    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether scores must be touched between the two products, which PyTorch's fused attention can't."""
        return self.soft_cap is not None or self.sinks is not None


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    float8: torch.dtype | None,
) -> None:
    """Write new K and V rows to their cache slots.

    Args:
        key: (>= tokens, num_kv_heads, head_size).
        value: as ``key``.
        cache: (pages, num_kv_heads, page_size, 2 * head_size), written in place: uint8 for an 8-bit cache.
        slot_mapping: (tokens,) int64, slot of each token; those below 0 are not written.
        k_scale: descale of K, 1 or num_kv_heads elements; the cache holds ``key / k_scale``.
        v_scale: descale of V, likewise.
        float8: format of an 8-bit cache; None for a cache of plain floats, which takes no scales.
    """
    tokens = slot_mapping.shape[0]
    rows = torch.cat((key[:tokens], value[:tokens]), dim=-1)
    if float8 is not None:
        half = key.shape[-1]
        if not _all_ones(k_scale) or not _all_ones(v_scale):
            rows = rows.float()
            rows[..., :half] /= k_scale.view(-1, 1)
            rows[..., half:] /= v_scale.view(-1, 1)
        if float8 == torch.float8_e4m3fn:
            rows = e4m3.quantise(rows)
        else:
            largest = torch.finfo(float8).max
            rows = rows.clamp(-largest, largest).to(float8).view(torch.uint8)
    else:
        rows = rows.to(cache.dtype)
    if tokens and int(slot_mapping.min()) < 0:
        live = slot_mapping >= 0
        slot_mapping, rows = slot_mapping[live], rows[live]
    page_size = cache.shape[2]
    cache.transpose(1, 2)[slot_mapping // page_size, slot_mapping % page_size] = rows


def attend(
    query: torch.Tensor,
    out: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    *,
    softmax_scale: float,
    causal: bool,
    rules: MaskRules,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    float8: torch.dtype | None,
) -> None:
    """Attention of every request of a step over its pages.

    Args:
        query: (tokens, num_heads, head_size).
        out: as ``query``; written in place.
        cache: (pages, num_kv_heads, page_size, 2 * head_size).
        block_table: (requests, max_blocks).
        query_start_loc: start of each request in ``query``, and the end of the last.
        seq_lens: tokens of each sequence, the new ones included.
        softmax_scale: factor of the scores.
        causal: mask keys after a query token's own position.
        rules: everything else about the mask.
        k_scale: descale of K, 1 or num_kv_heads elements.
        v_scale: descale of V, likewise.
        float8: format of an 8-bit cache; None for a cache of plain floats.
    """
    for request, length in enumerate(seq_lens):
        first, last = query_start_loc[request], query_start_loc[request + 1]
        if first == last:
            continue
        keys, values = _read_sequence(cache, block_table[request], length, query.dtype, float8)
        if float8 is not None:
            keys, values = _scaled(keys, k_scale), _scaled(values, v_scale)
        rows = query[first:last].transpose(0, 1)
        result = _attend_one(rows, keys, values, softmax_scale, causal, rules)
        out[first:last] = result.transpose(0, 1)


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    rules: MaskRules,
) -> torch.Tensor:
    """One request: query (heads, tokens, head_size), keys and values (KV heads, length, head_size)."""
    tokens, length = query.shape[1], keys.shape[1]
    whole_prompt = causal and tokens == length and rules.sliding_window is None and rules.alibi_slopes is None
    if not rules.needs_scores:
        return functional.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=None if whole_prompt else _mask(tokens, length, causal, rules, query.dtype),
            is_causal=whole_prompt,
            scale=softmax_scale,
            enable_gqa=True,
        )[0]
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.float().repeat_interleave(group, 0), values.float().repeat_interleave(group, 0)
    scores = query.float() @ keys.transpose(1, 2) * softmax_scale
    if rules.soft_cap is not None:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    mask = _mask(tokens, length, causal, rules, torch.float32)
    if mask is not None:
        scores = scores + mask
    if rules.sinks is not None:
        sink = rules.sinks.float()[:, None, None].expand(-1, tokens, 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights @ values


def _mask(tokens: int, length: int, causal: bool, rules: MaskRules, dtype: torch.dtype) -> torch.Tensor | None:
    """Additive mask (tokens, length), or (heads, tokens, length) with ALiBi; None where every key counts."""
    position = torch.arange(length - tokens, length)[:, None]
    key = torch.arange(length)
    hidden = torch.zeros((tokens, length), dtype=torch.bool)
    if causal:
        hidden |= key > position
    if rules.sliding_window is not None:
        hidden |= key <= position - rules.sliding_window
    if rules.alibi_slopes is None and not bool(hidden.any()):
        return None
    bias = torch.zeros((tokens, length), dtype=torch.float32)
    if rules.alibi_slopes is not None:
        bias = rules.alibi_slopes.float()[:, None, None] * (key - position)
    return bias.masked_fill(hidden, -torch.inf).to(dtype)


def _read_sequence(
    cache: torch.Tensor, blocks: torch.Tensor, length: int, dtype: torch.dtype, float8: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence, (num_kv_heads, length, head_size) each, without their descale."""
    page_size = cache.shape[2]
    pages = torch.index_select(cache, 0, blocks[: -(-length // page_size)])
    rows = pages.transpose(0, 1).flatten(1, 2)[:, :length].contiguous()
    if float8 == torch.float8_e4m3fn:
        rows = e4m3.dequantise(rows)
    elif float8 is not None:
        rows = rows.view(float8)
    keys, values = rows.to(dtype).chunk(2, dim=-1)
    return keys, values


def _scaled(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows (num_kv_heads, length, head_size) times their descale, in the rows' dtype."""
    if _all_ones(scale):
        return rows
    return (rows * scale.view(-1, 1, 1)).to(rows.dtype)


def _all_ones(scale: torch.Tensor) -> bool:
    return scale.numel() == 1 and float(scale) == 1.0
