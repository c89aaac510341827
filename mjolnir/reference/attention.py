"""The oracle: paged attention in float64, one sequence and one query token at a time.

Used by tests only. It shares no code with what it checks: no plan, no tiles, no running maximum.
"""

import torch


def dequantised(cache: torch.Tensor) -> torch.Tensor:
    """float64 values of a cache of e4m3 bytes (uint8) or of floats."""
    if cache.dtype == torch.uint8:
        cache = cache.contiguous().view(torch.float8_e4m3fn)
    return cache.to(torch.float32).to(torch.float64)


def paged_attention(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: list[int],
    *,
    softmax_scale: float,
    k_scale: torch.Tensor | float = 1.0,
    v_scale: torch.Tensor | float = 1.0,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last ``query_lens[i]`` tokens of each sequence over all its keys.

    Args:
        query: (total query tokens, num_heads, head_size).
        k: (pages, page_size, num_kv_heads, head_size), uint8 e4m3 codes or floats.
        v: as ``k``.
        block_table: (num_seqs, max_blocks).
        seq_lens: (num_seqs,), tokens with the new ones.
        query_lens: new tokens of each sequence.
        softmax_scale: factor of the scores.
        k_scale: descale of K: a number, or a tensor of 1, (num_kv_heads,) or (num_seqs, num_kv_heads) elements.
        v_scale: descale of V, likewise.
        causal: mask keys after a query token's own position.
        sliding_window: keys a query token sees, its own included; None for all.
        soft_cap: scores become ``cap * tanh(score / cap)``.

    Returns:
        The output, float64, shape of ``query``; and the natural-log LSE, float64, (tokens, num_heads).
    """
    num_heads, num_kv_heads = query.shape[1], k.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
    k_scales = _scales(k_scale, len(query_lens), num_kv_heads)
    v_scales = _scales(v_scale, len(query_lens), num_kv_heads)
    row = 0
    for seq, query_len in enumerate(query_lens):
        length = int(seq_lens[seq])
        keys = _gather(k, block_table[seq], length) * k_scales[seq, :, None]
        values = _gather(v, block_table[seq], length) * v_scales[seq, :, None]
        for token in range(query_len):
            last = length - query_len + token if causal else length - 1
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            if last >= 0:
                for head in range(num_heads):
                    kv_head = head // (num_heads // num_kv_heads)
                    scores = keys[first : last + 1, kv_head] @ query[row, head].double() * softmax_scale
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    lse[row, head] = torch.logsumexp(scores, dim=0)
                    out[row, head] = torch.softmax(scores, dim=0) @ values[first : last + 1, kv_head]
            row += 1
    return out, lse


def _gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """(length, num_kv_heads, head_size) float64: the rows of one sequence."""
    page_size = cache.shape[1]
    rows = [cache[int(blocks[token // page_size]), token % page_size] for token in range(length)]
    if not rows:
        return torch.zeros((0, *cache.shape[2:]), dtype=torch.float64)
    return dequantised(torch.stack(rows))


def _scales(scale: torch.Tensor | float, num_seqs: int, num_kv_heads: int) -> torch.Tensor:
    return torch.as_tensor(scale, dtype=torch.float64).expand(num_seqs, num_kv_heads)
