"""The split-KV plan: which program reads which part of which sequence's KV cache.

Pure arithmetic over sequence lengths; no torch, no vLLM. The plan that a step runs with may be made elsewhere
(on the device, by the kernel side); this one is its oracle, and the one the PyTorch executor uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mjolnir.errors import PlanError

TILE_TOKENS = 128  # KV tokens of one tile, the unit in which the work is cut


@dataclass(frozen=True)
class WorkItem:
    """One program's share: tiles ``[tile_begin, tile_end)`` of sequence ``seq``, its ``split``-th piece."""

    seq: int
    tile_begin: int
    tile_end: int
    split: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.tile_end - self.tile_begin


@dataclass(frozen=True)
class SplitPlan:
    """A plan for one batch.

    Attributes:
        slots: work items that run at the same time, for one query tile and KV head.
        chunk: most tiles that one work item reads.
        n_splits: for each sequence, the number of pieces it is cut into.
        work: the work items, longest first; equally long ones in sequence order.
        grid: number of programs to launch; those beyond ``work`` have nothing to do.
    """

    slots: int
    chunk: int
    n_splits: tuple[int, ...]
    work: tuple[WorkItem, ...]
    grid: int


def wave_slots(num_kv_heads: int, q_tiles: int, num_sms: int, ctas_per_sm: int) -> int:
    """Work items that fit one wave: programs that run at once, divided by KV heads and query tiles."""
    return max(1, num_sms * ctas_per_sm // (num_kv_heads * q_tiles))


def plan_splits(
    seq_lens: Sequence[int],
    *,
    slots: int,
    max_splits: int,
    grid: int | None = None,
    margin: int = 0,
) -> SplitPlan:
    """Cut the KV ranges of a batch into work items.

    A batch that fills the wave by itself is not cut. A smaller one is cut into the largest equal chunks with
    which all pieces still fit one wave, so that the slots finish at about the same time.

    Args:
        seq_lens: tokens of each sequence, the new ones included; 0 is a padding row and gets one empty tile.
        slots: work items that run at the same time (`wave_slots`).
        max_splits: most pieces of one sequence.
        grid: programs to launch; by default as many as slots or sequences, whichever is more.
        margin: tokens by which each sequence may grow while the plan stays in use.

    Raises:
        PlanError: no sequence, or more work items than ``grid``.
    """
    if not seq_lens:
        raise PlanError("a plan needs at least one sequence")
    tiles = [max(1, -(-(length + margin) // TILE_TOKENS)) for length in seq_lens]
    longest = max(tiles)
    chunk = longest
    if len(tiles) < slots and max_splits > 1:
        chunk = _smallest_chunk(tiles, slots, smallest=max(1, -(-longest // max_splits)))
    n_splits = tuple(-(-count // chunk) for count in tiles)
    work = [
        WorkItem(seq, split * chunk, min((split + 1) * chunk, tiles[seq]), split)
        for seq, splits in enumerate(n_splits)
        for split in range(splits)
    ]
    work.sort(key=lambda item: -item.tiles)
    grid = max(slots, len(tiles)) if grid is None else grid
    if len(work) > grid:
        raise PlanError(f"{len(work)} work items for a grid of {grid}")
    return SplitPlan(slots, chunk, n_splits, tuple(work), grid)


def _smallest_chunk(tiles: list[int], slots: int, smallest: int) -> int:
    """The smallest chunk, at least ``smallest``, with which the pieces of all sequences fit the slots.

    The number of pieces only falls as the chunk grows, so a binary search finds it.
    """
    low, high = smallest, max(tiles)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-count // middle) for count in tiles) <= slots:
            high = middle
        else:
            low = middle + 1
    return low
