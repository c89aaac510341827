"""The memory that pages of a packed KV cache are expanded to for a fallback step: one buffer a device.

It is taken while the model is being loaded, so that vLLM counts it with the weights and not finds it missing from
the memory that it has given to the cache. Layers run one after the other, so all of them share it.
"""

import torch

# At least as many tokens in one pass, so that a step of many requests is not cut into small ones: 256 MiB with 8 KV
# heads of 128 in 16 bits. A longer context needs more, since one request is never cut.
TOKENS = 65_536

_buffers: dict[torch.device, torch.Tensor] = {}


def tokens_for(max_model_len: int) -> int:
    """Tokens that the scratch has room for."""
    return max(TOKENS, max_model_len + 128)  # and what the last page has beyond


def reserve(device: torch.device, tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    """Make the buffer of a device large enough for a kind of layer."""
    needed = tokens * _token_bytes(num_kv_heads, head_size, dtype)
    if device not in _buffers or _buffers[device].numel() < needed:
        _buffers[device] = torch.empty(needed, dtype=torch.uint8, device=device)


def pages(
    device: torch.device, count: int, num_kv_heads: int, page_size: int, head_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """(count, num_kv_heads, page_size, 2 * head_size) of the buffer of a device, which has been reserved."""
    shape = (count, num_kv_heads, page_size, 2 * head_size)
    used = count * page_size * _token_bytes(num_kv_heads, head_size, dtype)
    return _buffers[device][:used].view(dtype).view(shape)


def _token_bytes(num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    return num_kv_heads * 2 * head_size * int(dtype.itemsize)
