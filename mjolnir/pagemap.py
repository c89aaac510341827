"""Which pages of a packed KV cache a fallback step reads, and where they go in the scratch that they are expanded to.

A page that several requests share is expanded once. The map is made on the device, without a synchronisation; the
host knows an upper bound of the lengths and cuts a step that would not fit the scratch into runs of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mjolnir.errors import PlanError

_NO_PAGE = 2**31 - 1  # sorts behind every page


@dataclass(frozen=True)
class PageMap:
    """Pages of some requests in the scratch.

    Attributes:
        sources: (pages,) int32, page of the cache that each scratch page is expanded from, ascending; -1 for none.
        block_table: (num_reqs, max_blocks) int32, scratch page of each page of a request, 0 past its end.
    """

    sources: torch.Tensor
    block_table: torch.Tensor


def map_pages(block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, bound: int) -> PageMap:
    """The map of a run of requests.

    Args:
        block_table: (num_reqs, max_blocks) int32, pages of the cache; what stands past the end of a sequence may be
            anything.
        seq_lens: (num_reqs,) int32, tokens of each sequence, on the same device.
        page_size: tokens of a page.
        bound: what the number of pages of these requests, shared ones counted again, can't exceed.
    """
    num_reqs, width = block_table.shape
    column = torch.arange(width, device=block_table.device)
    live = column < ((seq_lens[:, None] + page_size - 1) // page_size)
    pages, origin = torch.where(live, block_table, _NO_PAGE).flatten().sort()
    known = pages != _NO_PAGE
    first = known.clone()
    first[1:] &= pages[1:] != pages[:-1]
    number = first.cumsum(0) - 1
    # One place more than needed takes what is no page.
    sources = torch.full((bound + 1,), -1, dtype=torch.int32, device=block_table.device)
    sources.scatter_(0, number.where(known, bound), pages.where(known, -1).to(torch.int32))
    table = torch.zeros(num_reqs * width, dtype=torch.int32, device=block_table.device)
    table.scatter_(0, origin, number.where(known, 0).to(torch.int32))
    return PageMap(sources[:bound], table.view(num_reqs, width))


def runs_of_requests(pages: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Cut a step into runs of requests whose pages fit the scratch, ``[first, last)`` each.

    Args:
        pages: pages of each request, at most.
        capacity: pages of the scratch.

    Raises:
        PlanError: one request alone does not fit.
    """
    runs, first, total = [], 0, 0
    for request, count in enumerate(pages):
        if count > capacity:
            raise PlanError(f"request {request} of the step has {count} pages, the scratch for fp6_e2m3 {capacity}")
        if total + count > capacity:
            runs.append((first, request))
            first, total = request, 0
        total += count
    runs.append((first, len(pages)))
    return runs
