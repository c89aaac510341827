"""KV layouts: the views address the bytes that the layout's name promises."""

import pytest
import torch

from mjolnir.errors import LayoutError
from mjolnir.layouts import detect_layout, split_kv

PAGES, HEADS, PAGE_SIZE, ROW = 5, 3, 16, 8
LAYOUTS = ["BHN2D", "BNH2D", "B2NHD", "B2HND", "2BNHD", "2BHND"]
DIMENSIONS = {"B": PAGES, "H": HEADS, "N": PAGE_SIZE, "D": ROW, "2": 2}


def shape_of(layout: str) -> tuple[int, ...]:
    letters = [*layout.removesuffix("2D"), "2D"] if layout.endswith("2D") else list(layout)
    return tuple(2 * ROW if letter == "2D" else DIMENSIONS[letter] for letter in letters)


def place(layout: str, half: int, page: int, head: int, token: int, element: int) -> tuple[int, ...]:
    """Where an element of K (half 0) or V (half 1) is in the cache, read off the layout's name."""
    where = {"B": page, "H": head, "N": token, "2": half, "D": element}
    if layout.endswith("2D"):
        return (*(where[letter] for letter in layout.removesuffix("2D")), half * ROW + element)
    return tuple(where[letter] for letter in layout)


def numbered(layout: str) -> torch.Tensor:
    """A cache in which every element is another number."""
    shape = shape_of(layout)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_read_and_write_the_places_of_the_name(layout):
    cache = numbered(layout)
    reference = cache.clone()
    views = split_kv(cache, layout, ROW)
    for half, view in enumerate((views.k, views.v)):
        assert view.shape == (PAGES, PAGE_SIZE, HEADS, ROW)
        for page, token, head, element in [(0, 0, 0, 0), (1, 2, 1, 3), (4, 15, 2, 7), (3, 0, 2, 0), (0, 15, 0, 7)]:
            where = place(layout, half, page, head, token, element)
            assert view[page, token, head, element] == reference[where]
            view[page, token, head, element] = -1 - half
            assert cache[where] == -1 - half  # no copy: what is written arrives in the cache
            reference[where] = -1 - half
    assert torch.equal(cache, reference)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_together_cover_the_cache_once(layout):
    cache = torch.zeros(shape_of(layout), dtype=torch.uint8)
    views = split_kv(cache, layout, ROW)
    views.k.add_(1)
    assert int(cache.sum()) == cache.numel() // 2
    views.v.add_(1)
    assert bool((cache == 1).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_of_k_and_v_come_back_from_any_layout(layout):
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randint(0, 256, (2, PAGES, PAGE_SIZE, HEADS, ROW), dtype=torch.uint8, generator=generator)
    cache = torch.zeros(shape_of(layout), dtype=torch.uint8)
    written = split_kv(cache, layout, ROW)
    written.k.copy_(k)
    written.v.copy_(v)
    read = split_kv(cache, layout, ROW)
    assert torch.equal(read.k, k)
    assert torch.equal(read.v, v)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_view_only_where_k_and_v_lie_side_by_side(layout):
    cache = numbered(layout)
    views = split_kv(cache, layout, ROW)
    if not layout.endswith("2D"):
        assert views.fused is None
        return
    assert views.fused.shape == (PAGES, HEADS, PAGE_SIZE, 2 * ROW)
    assert views.fused.data_ptr() == cache.data_ptr()
    assert torch.equal(views.fused[..., :ROW].transpose(1, 2), views.k)
    assert torch.equal(views.fused[..., ROW:].transpose(1, 2), views.v)


def test_physical_order_lives_in_the_strides():
    """vLLM's logical (B, H, N, C) over token-major memory."""
    memory = torch.arange(PAGES * PAGE_SIZE * HEADS * 2 * ROW).view(PAGES, PAGE_SIZE, HEADS, 2 * ROW)
    views = split_kv(memory.transpose(1, 2), "BHN2D", ROW)
    assert views.k.stride() == (PAGE_SIZE * HEADS * 2 * ROW, HEADS * 2 * ROW, 2 * ROW, 1)
    assert torch.equal(views.k, memory[..., :ROW])
    assert torch.equal(views.v, memory[..., ROW:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_recognised_by_its_shape(layout):
    assert detect_layout(shape_of(layout), HEADS, PAGE_SIZE, ROW) == layout


@pytest.mark.parametrize(
    ("shape", "heads", "page_size", "winner"),
    [
        ((5, 16, 16, 16), 16, 16, "BHN2D"),
        ((5, 2, 16, 16, 8), 16, 16, "B2NHD"),
        ((2, 5, 16, 16, 8), 16, 16, "2BNHD"),
        ((2, 2, 16, 3, 8), 3, 16, "B2NHD"),  # two pages: the second dimension could be either
        ((2, 2, 3, 16, 8), 3, 16, "B2HND"),
    ],
)
def test_ties_go_to_the_first_that_fits(shape, heads, page_size, winner):
    assert detect_layout(shape, heads, page_size, 8) == winner


@pytest.mark.parametrize(
    "shape",
    [
        (5, 3, 16, 8),  # K only
        (5, 3, 32, 16),  # another page size
        (5, 4, 16, 16),  # another number of heads
        (5, 3, 16, 12),  # packed rows where bytes are expected
        (5, 3, 16, 16, 1),
        (3, 16, 16),
        (5, 3, 3, 16, 8),
        (),
    ],
)
def test_unknown_shape_says_what_it_is_and_what_to_set(shape):
    with pytest.raises(LayoutError) as error:
        detect_layout(shape, HEADS, PAGE_SIZE, ROW)
    assert str(error.value) == (
        f"KV cache of shape {shape} fits no layout for 3 KV heads, pages of 16 tokens and rows of 8; set "
        "MJOLNIR_ATTN_KV_LAYOUT to one of BHN2D, BNH2D, B2NHD, B2HND, 2BNHD, 2BHND, or MJOLNIR_ATTN_DISABLE=1"
    )


@pytest.mark.parametrize(("layout", "shape", "needed"), [("B2NHD", (5, 3, 16, 16), 5), ("BHN2D", (5, 2, 16, 3, 8), 4)])
def test_forced_layout_of_other_dimensions_is_refused(layout, shape, needed):
    with pytest.raises(LayoutError) as error:
        split_kv(torch.zeros(shape), layout, ROW)
    assert str(error.value) == f"KV cache of shape {shape} is not {layout}: it needs {needed} dimensions"
