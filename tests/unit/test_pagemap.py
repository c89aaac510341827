"""Where the pages of a fallback step go in the scratch: each once, whoever shares it."""

import pytest
import torch

from mjolnir import scratch
from mjolnir.errors import PlanError
from mjolnir.pagemap import map_pages, runs_of_requests

ANY = 2**31 - 1  # what may stand past the end of a sequence


def tables(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_pages_are_numbered_from_the_lowest_and_dead_entries_are_zero() -> None:
    """Lengths 0, 1, a page, and a page and one."""
    table = tables([ANY, -1, ANY], [9, -1, 5], [4, ANY, 9], [7, 2, ANY])
    lengths = torch.tensor([0, 1, 16, 17], dtype=torch.int32)
    pages = map_pages(table, lengths, 16, bound=4)
    assert pages.sources.tolist() == [2, 4, 7, 9]
    assert pages.block_table.tolist() == [[0, 0, 0], [3, 0, 0], [1, 0, 0], [2, 0, 0]]


def test_a_shared_prefix_is_expanded_once() -> None:
    """Two requests with the same first two pages: four pages in place of six, the rest of the room is empty."""
    table = tables([5, 3, 8], [5, 3, 6])
    pages = map_pages(table, torch.tensor([48, 48], dtype=torch.int32), 16, bound=6)
    assert pages.sources.tolist() == [3, 5, 6, 8, -1, -1]
    assert pages.block_table.tolist() == [[1, 0, 3], [1, 0, 2]]
    assert pages.sources.dtype == pages.block_table.dtype == torch.int32


def test_every_page_of_a_request_is_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 60, (9, 12), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 12 * 32 + 1, (9,), generator=generator, dtype=torch.int32)
    counts = [-(-int(length) // 32) for length in lengths]
    pages = map_pages(table, lengths, 32, bound=sum(counts))
    for request, count in enumerate(counts):
        found = pages.sources[pages.block_table[request, :count].long()]
        assert torch.equal(found, table[request, :count])
    real = pages.sources[pages.sources >= 0].tolist()
    assert real == sorted(set(real))


@pytest.mark.parametrize(
    ("counts", "capacity", "runs"),
    [
        ([3, 4, 1], 8, [(0, 3)]),
        ([3, 4, 2], 8, [(0, 2), (2, 3)]),
        ([8, 8], 8, [(0, 1), (1, 2)]),
        ([0, 0, 0], 8, [(0, 3)]),
        ([5, 0, 5], 8, [(0, 2), (2, 3)]),
    ],
)
def test_runs_fit_the_scratch(counts: list[int], capacity: int, runs: list[tuple[int, int]]) -> None:
    assert runs_of_requests(counts, capacity) == runs


def test_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="request 1 of the step has 9 pages, the scratch for fp6_e2m3 8"):
        runs_of_requests([1, 9], 8)


def test_the_scratch_is_one_buffer_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_buffers", {})
    device = torch.device("cpu")
    tokens = scratch.tokens_for(1000)
    assert tokens == scratch.TOKENS
    assert scratch.tokens_for(100_000) == 100_128
    for heads in (2, 1, 2):
        scratch.reserve(device, tokens, heads, 64, torch.bfloat16)
    small, large = (scratch.pages(device, count, 2, 16, 64, torch.bfloat16) for count in (1, tokens // 16))
    assert small.data_ptr() == large.data_ptr()
    assert large.shape == (4096, 2, 16, 128)
    assert scratch._buffers[device].numel() == tokens * 2 * 128 * 2
