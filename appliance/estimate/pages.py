"""vLLM's paging of the KV cache, in whole numbers: pages, groups, blocks a sequence, tokens that fit.

It follows vLLM 0.32.0's ``v1/core/kv_cache_utils.py`` and the block alignment of ``platforms/interface.py`` for one GPU
and no speculation; tests/engine/test_estimate.py compares the two. What it does: every layer has a page of
``block_size`` tokens; layers of one kind are a group with one block table; all groups draw blocks from one pool, so
a block must hold the pages of the largest group, and small pages are padded or made longer until all are equal.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from appliance.errors import ModelError
from appliance.estimate.layers import Attention, Kept, State
from mjolnir.names import FP6_KV_DTYPE

# Bits of a number in the cache. fp6_e2m3 packs four codes into three bytes, and its pages have no padding.
FORMATS = {"auto": 16, "fp8": 8, FP6_KV_DTYPE: 6}
KERNEL_PAGES = (16, 32, 64, 128)
_WIDTHS = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Paging:
    """How an engine pages its cache.

    Attributes:
        kv_format: one of `FORMATS`.
        block_size: tokens of a page, before alignment.
        in_flight_tokens: tokens that steps under way may hold beyond a window: batch tokens times steps at a time.
        float32_states: whether recurrent states of the model's own type are kept in float32.
    """

    kv_format: str
    block_size: int
    in_flight_tokens: int
    float32_states: bool = False


@dataclass(frozen=True)
class Page:
    """One layer's page.

    Attributes:
        kind: "full", "sliding" or "state".
        tokens: tokens it covers.
        size: bytes, with padding.
        window: tokens that stay.
        states: pages of a sequence, whatever its length.
        shape: what tells pages of one size apart.
    """

    kind: str
    tokens: int
    size: int
    window: int = 0
    states: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """Layers with one block table.

    Attributes:
        page: the first layer's.
        size: bytes that its layers take of a block.
        layers: how many there are.
    """

    page: Page
    size: int
    layers: int


@dataclass(frozen=True)
class Plan:
    """How a model's cache is paged.

    Attributes:
        groups: its groups.
        block_bytes: bytes of a block, over all layers of the largest group.
        paging: what it was made for.
    """

    groups: tuple[Group, ...]
    block_bytes: int
    paging: Paging

    def blocks_of(self, length: int) -> int:
        """Blocks that a sequence of ``length`` tokens holds at most."""
        return sum(_blocks(group.page, length, self.paging) for group in self.groups)

    def tokens_in(self, size: int, length: int) -> int:
        """Tokens of sequences of ``length`` that fit into ``size`` bytes: vLLM's "KV cache size: N tokens"."""
        if not self.groups:
            return 0
        return int(size // self.block_bytes / self.blocks_of(length) * length)

    def longest(self, size: int, sequences: int, limit: int) -> int:
        """Longest context, up to ``limit`` tokens, that ``sequences`` may have at one time; 0 if none.

        One block is vLLM's null block and holds nothing.
        """
        blocks = size // self.block_bytes - 1 if self.groups else 0
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if sequences * self.blocks_of(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def row_bytes(elements: int, kv_format: str) -> int:
    """Bytes of a row of K or V.

    Raises:
        ModelError: 6-bit codes that do not fill whole bytes.
    """
    bits = elements * FORMATS[kv_format]
    if bits % 8:
        raise ModelError(f"head size {elements} can't be packed in {kv_format}; accepted: multiples of 4")
    return bits // 8


def token_bytes(layer: Attention, kv_format: str) -> int:
    """Bytes that one token takes in one layer."""
    return layer.kv_heads * (row_bytes(layer.head_size, kv_format) + row_bytes(layer.head_size_v, kv_format))


def state_bytes(layer: State, *, float32: bool = False) -> int:
    """Bytes of one sequence's state in one layer; the cache's format does not touch it."""
    dtype = "float32" if float32 and layer.recurrent_dtype == "auto" else layer.recurrent_dtype
    return layer.convolution * 2 + layer.recurrent * _WIDTHS[dtype]


def plan(layers: Iterable[Kept], paging: Paging) -> Plan:
    """Page a model's layers.

    Raises:
        ModelError: a format that a layer can't have, or pages that can't be made equal.
    """
    own = [layer for layer in layers if layer is not None and not (isinstance(layer, Attention) and layer.shared)]
    block_size = _aligned(own, paging)
    padded = _state_padding(own, block_size, paging)
    pages = [_page(layer, block_size, padded, paging) for layer in own]
    if not pages:
        return Plan((), 0, paging)
    if len({(page.kind, page.tokens, page.window) for page in pages}) == 1:
        groups: tuple[Group, ...] = (Group(pages[0], sum(page.size for page in pages), len(pages)),)
    else:
        groups = _groups(_equal(pages))
    return Plan(groups, max(group.size for group in groups), paging)


def _page(layer: Attention | State, block_size: int, padded: int, paging: Paging) -> Page:
    if isinstance(layer, State):
        size = padded or state_bytes(layer, float32=paging.float32_states)
        # The running state, the one at the last block's boundary for a prompt that begins alike, and checkpoints.
        return Page("state", block_size, size, 0, 2 + layer.checkpoints, (layer.convolution, layer.recurrent))
    size = token_bytes(layer, paging.kv_format)
    shape = (layer.kv_heads, layer.head_size, layer.head_size_v)
    if layer.window is None:
        return Page("full", block_size, size * block_size, shape=shape)
    # A sliding layer takes a kernel's page: the longest one that is no longer than the others' pages.
    tokens = max((page for page in KERNEL_PAGES if page <= block_size), default=KERNEL_PAGES[0])
    return Page("sliding", tokens, size * tokens, layer.window, shape=shape)


def _aligned(layers: Sequence[Attention | State], paging: Paging) -> int:
    """Tokens of a page: long enough that an attention layer's page holds a state."""
    states = [state_bytes(layer, float32=paging.float32_states) for layer in layers if isinstance(layer, State)]
    attention = [token_bytes(layer, paging.kv_format) for layer in layers if isinstance(layer, Attention)]
    if not states or not attention:
        return paging.block_size
    step = max(KERNEL_PAGES[0], paging.block_size)
    return max(paging.block_size, step * math.ceil(max(states) / (step * attention[0])))


def _state_padding(layers: Sequence[Attention | State], block_size: int, paging: Paging) -> int:
    """Bytes that a state's page is padded to; 0 where there is nothing to match."""
    attention = [token_bytes(layer, paging.kv_format) for layer in layers if isinstance(layer, Attention)]
    return block_size * attention[0] if attention else 0


def _equal(pages: Sequence[Page]) -> list[Page]:
    """Pages of one size: longer where a whole number of them fits the largest, else padded."""
    largest = max(page.size for page in pages)
    found = []
    for page in pages:
        if page.size == largest:
            found.append(page)
        elif page.kind != "state" and largest % page.size == 0:
            found.append(replace(page, tokens=page.tokens * (largest // page.size), size=largest))
        elif page.kind == "full" and page.shape[-1] == 0:
            raise ModelError("MLA pages beside larger ones can't be padded, and vLLM refuses such a model")
        else:
            found.append(replace(page, size=largest))
    return found


def _groups(pages: Sequence[Page]) -> tuple[Group, ...]:
    """Groups of equally many layers: as many as the rarest kind has, or the commonest where they are near.

    The last group of a kind may have fewer.
    """
    counts = Counter(pages)
    fewest, most = min(counts.values()), max(counts.values())
    width = most if most < fewest * 1.5 else fewest
    groups = []
    for page, count in counts.items():
        number = math.ceil(count / width)
        for index in range(number):
            layers = len(range(index, count, number))
            groups.append(Group(page, layers * page.size, layers))
    return tuple(groups)


def _blocks(page: Page, length: int, paging: Paging) -> int:
    """Blocks of a group that a sequence of ``length`` tokens holds at most."""
    if page.kind == "state":
        return page.states
    if page.kind == "full":
        return math.ceil(length / page.tokens)
    held = min(page.window - 1 + paging.in_flight_tokens, length)
    # One more, because a window need not begin where a block does.
    return math.ceil(held / page.tokens) + 1
