"""T5 on a CPU: the split-KV plan of the device kernels, executed with PyTorch operations.

The engine of a machine without a GPU decodes with it, so it is vectorised over work items: the few operations a
layer needs cost microseconds each, and everything that depends only on the step (indices, masks) is made once,
in `TorchRunner.plan`. The arithmetic follows the kernels: Q in e4m3 with one descale per sequence and KV head,
scores and P in float32, partial results of a split sequence merged by their log-sum-exp.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from mjolnir.layouts import PagedKV
from mjolnir.planner import TILE_TOKENS, SplitPlan, plan_splits
from mjolnir.reference import e4m3
from mjolnir.reference.packed_rows import PackedDequantiser
from mjolnir.runner import RunnerConfig

ROW_GROUP = 16  # tokens read at once: the smallest page, so that a read never crosses a page

# AMD EPYC (AVX2, 512 KiB L2), one core, demo's model, ms a step with 256/640/768/1,024 KiB: 8 sequences of 280
# tokens 70.5/39.9/41.1/44.1, 4 of 1,048 tokens 69.2/69.6/64.8/65.8.
BYTES_AT_ONCE = 768 * 1024

_Q_AMAX_FLOOR = 1e-6


@dataclass(frozen=True)
class ItemGroup:
    """Work items of similar length that are executed as one batch, padded to the longest of them.

    Attributes:
        seq: (items,) int64, sequence of each item.
        pages: (items, 1, row_groups) int64, page of each group of `ROW_GROUP` tokens.
        rows: (items, 1, row_groups) int64, which group of its page it is.
        tokens: tokens of the longest item, the length of the padded batch.
        live_bits: (items, 1, row_groups * ROW_GROUP, 1) int64, all bits set for a token of the item, none for one
            past its end; None where all items are equally long.
        hidden: (items, 1, query rows, tokens) bool, keys that a query row must not see; None where it sees all.
        bias: ``hidden`` as float32 to add to scores; None where it sees all, or where rows differ.
        causal_tail: whether rows of one item differ in what they see.
    """

    seq: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor
    tokens: int
    live_bits: torch.Tensor | None
    hidden: torch.Tensor | None
    bias: torch.Tensor | None
    causal_tail: bool
    _chunk_indices: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def chunk_index(self, heads: int, page_stride: int, head_stride: int) -> torch.Tensor:
        """(items * heads * row_groups,) int64: each group of tokens in a cache seen as rows of one group each.

        The layers of an attention group have the same strides, so the step's first layer makes it for all.
        """
        key = heads, page_stride, head_stride
        if key not in self._chunk_indices:
            head = torch.arange(heads)[:, None] * head_stride
            self._chunk_indices[key] = (self.pages * page_stride + head + self.rows).flatten()
        return self._chunk_indices[key]


@dataclass(frozen=True)
class TorchPlan:
    """A step's plan, with everything its layers share.

    Attributes:
        q_len: query tokens of each request.
        num_seqs: requests of the step.
        splits: the split-KV plan itself.
        groups: its work items, longest first, in batches.
        order: (num_seqs, max splits used) int64, position of each piece of each sequence among the items of
            all groups; absent pieces point behind the last item.
        whole: no sequence is split and every query row sees a key: nothing to merge, nothing to guard.
    """

    q_len: int
    num_seqs: int
    splits: SplitPlan
    groups: tuple[ItemGroup, ...]
    order: torch.Tensor
    whole: bool


class TorchRunner:
    """T5 for ``device="cpu"``; see `mjolnir.runner.DecodeRunner` for the interface.

    Threads are the SMs of a CPU: pieces that one thread reads one after the other only cost. The plan of a Thor's
    20, on one core of an AMD EPYC (AVX2), demo's model, µs a layer: 1,100 tokens 960 in 9 pieces, 607 whole; 300
    tokens 592 in 3 pieces, 324 whole.
    """

    def __init__(self, config: RunnerConfig, num_sms: int | None = None) -> None:
        self.config = config
        self.num_sms = num_sms or torch.get_num_threads()
        # Two, for layouts whose K and V are read apart.
        self._dequantise_k, self._dequantise_v = (_dequantiser(config) for _ in range(2))

    def plan(self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, q_len: int, causal: bool) -> TorchPlan:
        """Plan a step from the live sequence lengths."""
        lengths = [int(length) for length in seq_lens.tolist()]
        splits = plan_splits(lengths, slots=self.config.slots(q_len, self.num_sms), max_splits=self.config.max_splits)
        groups = tuple(
            self._item_group(splits, first, last, lengths, block_table, q_len if causal else 0)
            for first, last in _similar_runs([item.tiles for item in splits.work], self._tiles_at_once())
        )
        order = torch.full((len(lengths), max(splits.n_splits)), len(splits.work), dtype=torch.int64)
        for position, item in enumerate(splits.work):
            order[item.seq, item.split] = position
        whole = max(splits.n_splits) == 1 and min(lengths) >= q_len
        return TorchPlan(q_len, len(lengths), splits, groups, order, whole)

    def _tiles_at_once(self) -> int:
        """Tiles that are executed as one batch: enough to share an operation's cost, few enough to stay cached."""
        return max(1, BYTES_AT_ONCE // (TILE_TOKENS * self.config.num_kv_heads * 2 * self.config.head_size))

    def replan(self, plan: TorchPlan) -> None:
        """Nothing to do: nothing is captured on a CPU, vLLM builds new metadata for every draft step."""

    def run(
        self,
        plan: TorchPlan,
        query: torch.Tensor,
        out: torch.Tensor,
        kv: PagedKV,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        softmax_scale: float,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend, for one layer; see `mjolnir.runner.DecodeRunner.run`."""
        packed = self._pack_query(plan, query, self._descale(k_scale, plan.num_seqs), softmax_scale)
        if plan.whole and lse is None:
            merged = self._attend_whole(plan, packed, kv)
        else:
            parts = [_attend_part(group, packed[group.seq], *self._read(kv, group)) for group in plan.groups]
            merged = _merge(parts, plan.order, lse)
        descale = self._descale(v_scale, plan.num_seqs)
        if isinstance(descale, torch.Tensor) or descale != 1.0:
            merged *= descale
        self._unpack(plan, merged, out)

    def _pack_query(
        self, plan: TorchPlan, query: torch.Tensor, k_scale: torch.Tensor | float, softmax_scale: float
    ) -> torch.Tensor:
        """Query rows of each sequence and KV head, through e4m3 if so configured, ready to give final scores.

        Returns:
            (num_seqs, num_kv_heads, q_len * heads_per_kv_head, head_size) float32, row
            ``token * heads_per_kv_head + head``.
        """
        config = self.config
        rows = query[: plan.num_seqs * plan.q_len].view(
            plan.num_seqs, plan.q_len, config.num_kv_heads, config.heads_per_kv_head, config.head_size
        )
        packed = rows.transpose(1, 2).flatten(2, 3).float()
        # A K descale of 0 must give scores of 0, so it goes into the small operand, ahead of any mask.
        if config.q_dtype != "fp8":
            return packed * (k_scale * softmax_scale)
        if config.kv_format == "e2m3":  # by channel: no factor of a row that has been quantised
            packed, k_scale = packed * k_scale, 1.0
        scale = packed.abs().amax(dim=(2, 3), keepdim=True).clamp_min_(_Q_AMAX_FLOOR).div_(e4m3.MAX)
        # No saturation: the largest quotient is 448 within a rounding error, which rounds to 448.
        codes = (packed / scale).to(torch.float8_e4m3fn)
        return codes.float().mul_(scale.mul_(k_scale * softmax_scale))

    def _attend_whole(self, plan: TorchPlan, packed: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        """Attention where every sequence is one work item.

        Returns:
            (num_seqs, num_kv_heads, rows, head_size) float32.
        """
        if plan.num_seqs == 1:
            return _attend_group(plan.groups[0], packed, *self._read(kv, plan.groups[0]))
        merged = torch.empty_like(packed)
        for group in plan.groups:
            merged[group.seq] = _attend_group(group, packed[group.seq], *self._read(kv, group))
        return merged

    def _descale(self, scale: torch.Tensor, num_seqs: int) -> torch.Tensor | float:
        """A descale to broadcast over (num_seqs, num_kv_heads, rows, head_size); one element becomes a number."""
        if scale.numel() == 1:
            return float(scale)
        if self.config.kv_format == "e2m3" and scale.shape == (self.config.num_kv_heads, self.config.head_size):
            return scale[None, :, None]
        return scale.reshape(num_seqs if scale.dim() == 2 else 1, -1, 1, 1)

    def _read(self, kv: PagedKV, group: ItemGroup) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Keys and values of a group's items, (items, num_kv_heads, tokens, head_size) float32, and their factor."""
        if kv.fused is not None:
            both, factor = self._dequantise_k(_read_rows(kv.fused, group))
            both = both[:, :, : group.tokens]
            return both[..., : self.config.head_size], both[..., self.config.head_size :], factor
        keys, factor = self._dequantise_k(_read_rows(kv.k.transpose(1, 2), group))
        values, v_factor = self._dequantise_v(_read_rows(kv.v.transpose(1, 2), group))
        if factor != v_factor:  # one of the two holds a NaN
            keys, values, factor = keys * factor, values * v_factor, 1.0
        return keys[:, :, : group.tokens], values[:, :, : group.tokens], factor

    def _unpack(self, plan: TorchPlan, merged: torch.Tensor, out: torch.Tensor) -> None:
        """Write packed rows to their final place, in the output's dtype."""
        config = self.config
        shape = (plan.num_seqs, config.num_kv_heads, plan.q_len, config.heads_per_kv_head, config.head_size)
        tokens = merged.view(shape).transpose(1, 2)
        target = out[: plan.num_seqs * plan.q_len]
        target.copy_(tokens.reshape(target.shape))

    def _item_group(
        self,
        splits: SplitPlan,
        first: int,
        last: int,
        lengths: list[int],
        block_table: torch.Tensor,
        causal_q_len: int,
    ) -> ItemGroup:
        """Indices and masks of the work items ``[first, last)``; ``causal_q_len`` is 0 for a non-causal step."""
        items = splits.work[first:last]
        seq = torch.tensor([item.seq for item in items])
        begin = torch.tensor([item.tile_begin * TILE_TOKENS for item in items])
        end = torch.tensor([min(item.tile_end * TILE_TOKENS, lengths[item.seq]) for item in items])
        live = (end - begin).clamp_min_(0)
        tokens = max(1, int(live.max()))
        starts = torch.arange(0, tokens, ROW_GROUP) + begin[:, None]
        # Never look up the block table past the end of a sequence: what stands there may be anything.
        known = starts < end[:, None]
        position = starts.where(known, 0)
        pages = block_table[seq[:, None], position // self.config.page_size].long().where(known, 0)
        rows = position % self.config.page_size // ROW_GROUP
        key = torch.arange(starts.shape[1] * ROW_GROUP)
        row_dead = key >= live[:, None]
        key, dead = key[:tokens], row_dead[:, :tokens]
        any_dead = bool(dead.any())
        hidden = dead[:, None, None, :] if any_dead else None
        if causal_q_len > 1:
            length = torch.tensor([lengths[item.seq] for item in items])
            token = torch.arange(causal_q_len).repeat_interleave(self.config.heads_per_kv_head)
            last_visible = (length - causal_q_len)[:, None] + token
            hidden = ((key + begin[:, None])[:, None, :] > last_visible[:, :, None])[:, None]
            hidden = hidden | dead[:, None, None, :]
        live_bits = (row_dead.long() - 1)[:, None, :, None] if any_dead else None
        causal_tail = causal_q_len > 1
        bias = None
        if hidden is not None and not causal_tail:
            bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return ItemGroup(seq, pages[:, None], rows[:, None], tokens, live_bits, hidden, bias, causal_tail)


def _similar_runs(tiles: list[int], most: int) -> list[tuple[int, int]]:
    """Cut a descending list of tile counts into runs that are executed at once.

    The first of a run is less than twice the last, so padding stays below half; and a run has at most ``most``
    tiles with its padding, unless its only item has more.
    """
    runs, first = [], 0
    for position, count in enumerate(tiles):
        if position > first and (2 * count <= tiles[first] or (position - first + 1) * tiles[first] > most):
            runs.append((first, position))
            first = position
    runs.append((first, len(tiles)))
    return runs


def _read_rows(cache: torch.Tensor, group: ItemGroup) -> torch.Tensor:
    """Rows of all items of a group, one KV head after the other.

    Args:
        cache: (pages, num_kv_heads, page_size, row) uint8, any strides but the last.
        group: the items.

    Returns:
        (items, num_kv_heads, row_groups * ROW_GROUP, row) uint8; rows past an item's end are zero.
    """
    pages, heads, page_size, row = cache.shape
    items, chunk = len(group.seq), ROW_GROUP * row
    page_stride, head_stride, token_stride, _ = cache.stride()
    if token_stride == row and page_stride % chunk == 0 and head_stride % chunk == 0:
        # The tokens of a page and head are contiguous: seen as rows of one group each, reading is a plain gather.
        chunks = ((pages - 1) * page_stride + (heads - 1) * head_stride) // chunk + page_size // ROW_GROUP
        index = group.chunk_index(heads, page_stride // chunk, head_stride // chunk)
        picked = torch.index_select(cache.as_strided((chunks, chunk), (chunk, 1)), 0, index)
    else:
        grouped = cache.unflatten(2, (page_size // ROW_GROUP, ROW_GROUP))
        picked = grouped[group.pages, torch.arange(heads)[:, None], group.rows]
    rows = picked.view(items, heads, -1, row)
    if group.live_bits is not None:
        # By selection, not by a product of values: a stale byte may be a NaN, and 0 * NaN is NaN.
        rows.view(torch.int64).bitwise_and_(group.live_bits)
    return rows


def _scores(group: ItemGroup, packed: torch.Tensor, keys: torch.Tensor, factor: float) -> torch.Tensor:
    """(items, num_kv_heads, rows, tokens) float32, -inf where a row must not see a key."""
    scores = torch.matmul(packed if factor == 1.0 else packed * factor, keys.transpose(2, 3))
    if group.hidden is not None:
        scores.masked_fill_(group.hidden, -torch.inf)
    return scores


def _weighted(group: ItemGroup, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum of the values by their weights; a NaN in a value that a row does not see stays out of that row."""
    o = torch.matmul(weights, values)
    if group.causal_tail and group.hidden is not None and bool(o.isnan().any()):
        # The product has made NaN of 0 * NaN: a draft token's NaN would spoil the tokens ahead of it.
        seen = torch.where(group.hidden[..., None], 0.0, weights[..., None] * values[:, :, None])
        return seen.sum(dim=-2)
    return o


def _attend_group(
    group: ItemGroup, packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, factor: float
) -> torch.Tensor:
    """Attention of items that are whole sequences.

    Args:
        group: the items.
        packed: (items, num_kv_heads, rows, head_size) float32, the query rows.
        keys: (items, num_kv_heads, tokens, head_size) float32, to be multiplied by ``factor``.
        values: as ``keys``.
        factor: see `mjolnir.reference.e4m3.Dequantiser`.

    Returns:
        (items, num_kv_heads, rows, head_size) float32.
    """
    if group.causal_tail:
        o = _weighted(group, torch.softmax(_scores(group, packed, keys, factor), dim=-1), values)
    else:  # AMD EPYC, demo's model, µs: 280 tokens 87, against 128 as above; 1,048 tokens 265 against 340
        o = F.scaled_dot_product_attention(packed, keys, values, attn_mask=group.bias, scale=factor)
    return o if factor == 1.0 else o.mul_(factor)


def _attend_part(
    group: ItemGroup, packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial attention of each item of a group; arguments as `_attend_group`.

    Returns:
        O not yet divided by its sum (items, num_kv_heads, rows, head_size), the maximum of the scores and the
        sum of ``exp(score - maximum)`` (items, num_kv_heads, rows, 1), float32; an item without a visible key
        has O = 0, maximum -inf, sum 0.
    """
    scores = _scores(group, packed, keys, factor)
    maximum = scores.amax(dim=-1, keepdim=True)
    # Relative to 0 where no key is visible: every weight is then exp(-inf) = 0, not exp(-inf + inf).
    weights = scores.sub_(_finite(maximum)).exp_()
    o = _weighted(group, weights, values)
    return o if factor == 1.0 else o.mul_(factor), maximum, weights.sum(dim=-1, keepdim=True)


def _merge(
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], order: torch.Tensor, lse: torch.Tensor | None
) -> torch.Tensor:
    """Merge the pieces of each sequence by their log-sum-exp.

    Args:
        parts: what `_attend_part` gave for each group.
        order: `TorchPlan.order`.
        lse: where to write the natural-log LSE, or None.

    Returns:
        (num_seqs, num_kv_heads, rows, head_size) float32, 0 where a row saw no key.
    """
    pieces = [torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True)]
    if order.numel() == pieces[0].shape[0]:
        o, maximum, total = (piece[order] for piece in pieces)
    else:
        # One more item, without any key, for the pieces that a sequence does not have.
        empty = (0.0, -torch.inf, 0.0)
        padded = [
            torch.cat([piece, torch.full_like(piece[:1], value)]) for piece, value in zip(pieces, empty, strict=True)
        ]
        o, maximum, total = (piece[order] for piece in padded)
    top = maximum.amax(dim=1, keepdim=True)
    weight = (maximum - _finite(top)).exp_()
    denominator = (weight * total).sum(dim=1)
    merged = (weight * o).sum(dim=1) / denominator.where(denominator != 0, 1.0)
    if lse is not None:
        lse.copy_((top[:, 0] + denominator.log()).squeeze(-1))
    return merged


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """A maximum to subtract: 0 where it is -inf."""
    return maximum.where(maximum != -torch.inf, 0.0)


def _dequantiser(config: RunnerConfig) -> PackedDequantiser | e4m3.Dequantiser:
    return PackedDequantiser(config.head_size) if config.kv_format == "e2m3" else e4m3.Dequantiser()
