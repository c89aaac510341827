"""The Triton kernels that fill and expand an e2m3 cache, bit for bit against the reference.

On a GPU, or in Triton's interpreter in a process of its own; see `test_interpreted.py`.
"""

import dataclasses
import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mjolnir.errors import ConfigurationError, LayoutError
from mjolnir.layouts import PagedKV, split_kv
from mjolnir.reference import e2m3
from tests.kernels.decode_steps import LAYOUTS, in_layout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED,
    reason="needs a GPU or Triton's interpreter; tests/kernels/test_interpreted.py runs it there",
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCALES = ["tensor", "head", "channel"]


@dataclasses.dataclass(frozen=True)
class Case:
    """New tokens and the cache they go to; ``slots`` may lie outside the cache, and differ where they do not."""

    slots: tuple[int, ...]
    heads: int = 2
    head_size: int = 64
    pages: int = 3
    page_size: int = 4
    padding: int = 0
    dtype: torch.dtype = torch.bfloat16
    layout: str = "BHN2D"
    k_scale: str = "channel"
    v_scale: str = "channel"
    seed: int = 0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value as views of a fused QKV, values around every step of the format, padding of NaN."""
        tokens = len(self.slots) + self.padding
        width = self.heads * self.head_size
        fused = torch.randn((tokens, 4 * width + 16), generator=self.generator()) * 3
        fused = torch.where(fused.abs() < 0.7, fused / 8, fused)
        fused[len(self.slots) :] = torch.nan
        fused = fused.to(self.dtype).to(DEVICE)
        key, value = (fused[:, (2 + i) * width : (3 + i) * width] for i in range(2))
        return key.view(tokens, self.heads, self.head_size), value.view(tokens, self.heads, self.head_size)

    def scales(self) -> list[torch.Tensor]:
        shapes = {"tensor": (1,), "head": (self.heads,), "channel": (self.heads, self.head_size)}
        generator = self.generator()
        return [
            (torch.rand(shapes[mode], generator=generator) + 0.1).to(DEVICE) for mode in (self.k_scale, self.v_scale)
        ]

    def cache(self) -> tuple[torch.Tensor, PagedKV]:
        """Memory of random bytes, with a page ahead of the cache and one behind it, and the views of the cache."""
        row = e2m3.row_bytes(self.head_size)
        shape = (2, self.pages, self.page_size, self.heads, row)
        k, v = torch.randint(0, 256, shape, generator=self.generator()).to(torch.uint8)
        whole = in_layout(k, v, self.layout).to(DEVICE)
        page = whole.numel() // self.pages
        memory = torch.cat([whole.flatten()[:page], whole.flatten(), whole.flatten()[:page]])
        return memory, split_kv(memory[page:-page].view(whole.shape), self.layout, row)

    def slot_mapping(self) -> torch.Tensor:
        return torch.tensor(self.slots, dtype=torch.int64, device=DEVICE)


def assert_written_like_the_reference(case: Case, key=None, value=None, scales=None) -> PagedKV:
    """All memory is compared, so whatever nobody was to write is seen to be left alone."""
    from mjolnir.kernels.store import write_kv

    rows = case.rows() if key is None else (key, value)
    scales = scales or case.scales()
    expected, expected_kv = case.cache()
    e2m3.write_kv(*rows, expected_kv, case.slot_mapping(), *scales)
    actual, kv = case.cache()
    write_kv(*rows, kv, case.slot_mapping(), *scales)
    assert torch.equal(actual, expected)
    return kv


@st.composite
def write_cases(draw: st.DrawFn) -> Case:
    pages, page_size = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 4, 16]))
    inside = draw(st.lists(st.integers(0, pages * page_size - 1), unique=True, max_size=12))
    outside = draw(st.lists(st.sampled_from([-1, -(2**40), pages * page_size, 2**40]), max_size=4))
    return Case(
        slots=tuple(draw(st.permutations(inside + outside))),
        heads=draw(st.sampled_from([1, 2, 3, 8])),
        head_size=draw(st.sampled_from([64, 128, 256])),
        pages=pages,
        page_size=page_size,
        padding=draw(st.sampled_from([0, 0, 1, 3])),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        k_scale=draw(st.sampled_from(SCALES)),
        v_scale=draw(st.sampled_from(SCALES)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40 if INTERPRETED else 100, deadline=None, suppress_health_check=list(HealthCheck))
@given(write_cases())
@example(Case(slots=()))
@example(Case(slots=(), padding=2))
@example(Case(slots=(-1, -1), heads=1))
@example(Case(slots=(3,), heads=1, k_scale="head", v_scale="channel"))
@example(Case(slots=tuple(range(47, -1, -1)), page_size=16, heads=3, head_size=128, layout="2BNHD"))
def test_write(case: Case) -> None:
    assert_written_like_the_reference(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_special_values(dtype: torch.dtype) -> None:
    """NaN is 0, infinities and anything too large are 7.5, ties go towards zero, no negative zero."""
    special = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 7.25, 7.5, 8.0, -1000.0, 0.0625, -0.0625, 2.125, 3.875]
    expected = [0, 7.5, -7.5, 0, 0, 7.0, 7.5, 7.5, -7.5, 0, 0, 2.0, 3.75]
    rows = torch.tensor(special + special[:3] * 17, dtype=dtype, device=DEVICE).view(1, 1, 64)
    case = Case(slots=(5,), heads=1)
    one = torch.ones(1, device=DEVICE)
    kv = assert_written_like_the_reference(case, rows, -rows, [one, one])
    codes = [e2m3.unpack(half[1, 1, 0].cpu())[:13] for half in (kv.k, kv.v)]
    assert e2m3.decode(codes[0]).tolist() == expected
    assert e2m3.decode(codes[1]).tolist() == [-value for value in expected]
    assert not bool((torch.cat(codes) == 32).any())


def test_write_every_code_and_tie() -> None:
    """All values, the middles between them, and what is next to those."""
    values = e2m3.decode(torch.arange(32, dtype=torch.uint8))
    middles = (values[1:] + values[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(limit)) for limit in (9.0, 0.0))
    edges = torch.cat([values, middles, up, down, torch.tensor([1e-45, 1e-38, 3e38])])
    rows = edges.view(1, 2, 64).to(DEVICE)
    one = torch.ones(1, device=DEVICE)
    assert_written_like_the_reference(Case(slots=(0,)), rows, -rows, [one, one])


def test_write_divides_with_correct_rounding() -> None:
    """A scale whose products with the middles hardly differ from them: x * (1 / s) would land on the other side."""
    middles = torch.arange(1, 32, 2) / 16
    scales = torch.rand((64, 1), generator=torch.Generator().manual_seed(3)) + 0.5
    near = middles * scales
    rows = torch.cat([near, torch.nextafter(near, torch.tensor(9.0))], 1).repeat(1, 2).view(1, 64, 64)
    assert_written_like_the_reference(
        Case(slots=(1,), heads=64), rows.to(DEVICE), rows.to(DEVICE), [scales[:, 0].to(DEVICE)] * 2
    )


def test_equal_scales_are_the_same_in_every_shape() -> None:
    case = Case(slots=(0, 7, 3), heads=3, head_size=128)
    shapes = [(), (1,), (3,), (3, 128)]
    kvs = [
        assert_written_like_the_reference(case, *case.rows(), [torch.full(shape, 0.3, device=DEVICE)] * 2)
        for shape in shapes
    ]
    for kv in kvs[1:]:
        assert torch.equal(kv.k, kvs[0].k)
        assert torch.equal(kv.v, kvs[0].v)


@pytest.mark.parametrize(("mode", "step"), [("tensor", (0, 0)), ("head", (1, 0)), ("channel", (0, 1))])
def test_each_scale_meets_its_own_rows(mode: str, step: tuple[int, int]) -> None:
    """Rows that are 1.5 times their scale come out as 1.5, so that no scale may stand in for another."""
    heads, channels = torch.arange(4.0)[:, None], torch.arange(64.0)[None, :]
    scales = 1 + step[0] * heads + step[1] * channels
    rows = (1.5 * scales).expand(1, 4, 64).contiguous().to(DEVICE)
    given_scale = {"tensor": scales[0, 0], "head": scales[:, 0], "channel": scales}[mode].to(DEVICE)
    kv = assert_written_like_the_reference(
        Case(slots=(2,), heads=4), rows, rows, [given_scale, torch.ones(1).to(DEVICE)]
    )
    assert bool((e2m3.decode(e2m3.unpack(kv.k[0, 2].cpu())) == 1.5).all())


def test_write_with_32_bit_slots_and_padded_cache_rows() -> None:
    """A cache whose cells lie in wider ones, as where several layers share pages; the bytes between stay."""
    from mjolnir.kernels.store import write_kv

    case = Case(slots=(4, 9))
    whole = torch.full((3, 2, 4, 160), 0xAA, dtype=torch.uint8, device=DEVICE)
    kv = split_kv(whole[..., 32:128], "BHN2D", 48)
    write_kv(*case.rows(), kv, case.slot_mapping().int(), *case.scales())
    _, expected = case.cache()
    e2m3.write_kv(*case.rows(), expected, case.slot_mapping(), *case.scales())
    for slot in case.slots:
        cells = torch.cat([half[slot // 4, slot % 4] for half in (expected.k, expected.v)], dim=-1)
        assert torch.equal(whole[slot // 4, :, slot % 4, 32:128], cells)
        whole[slot // 4, :, slot % 4, 32:128] = 0xAA
    assert bool((whole == 0xAA).all())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="a cache and rows of gigabytes")
def test_offsets_beyond_32_bits() -> None:
    """The last token's rows and the last page lie behind 2^31, while each stride and slot fits 32 bits."""
    from mjolnir.kernels.store import expand_pages, write_kv

    pages = 33_000
    case = Case(slots=(1 + 4 * 5, -1, -1, -1, -1, 2 + 4 * (pages - 1)))
    distance = 2**29
    flat = torch.zeros(5 * distance + 128, dtype=torch.bfloat16, device=DEVICE)
    wide = flat.as_strided((6, 2, 64), (distance, 64, 1))
    wide.copy_(case.rows()[0])
    whole = torch.zeros((pages, 2, 4, 8192), dtype=torch.uint8, device=DEVICE)
    kv = split_kv(whole[..., :96], "BHN2D", 48)
    write_kv(wide, wide, kv, case.slot_mapping().int(), *case.scales())
    blocks = torch.tensor([5, pages - 1], dtype=torch.int32, device=DEVICE)
    expected = split_kv(torch.zeros((2, 2, 4, 96), dtype=torch.uint8, device=DEVICE), "BHN2D", 48)
    packed = torch.tensor([1, -1, -1, -1, -1, 6], device=DEVICE)
    e2m3.write_kv(case.rows()[0], case.rows()[0], expected, packed, *case.scales())
    assert torch.equal(kv.k[blocks], expected.k)
    assert torch.equal(kv.v[blocks], expected.v)
    out = torch.zeros((2, 2, 4, 128), dtype=torch.uint8, device=DEVICE)
    local = torch.tensor([0, 1], device=DEVICE)
    assert torch.equal(expand_pages(kv, blocks, out), e2m3.expand_pages(expected, local, torch.zeros_like(out)))


@dataclasses.dataclass(frozen=True)
class Expansion:
    """Pages to expand, and how ``out`` lies in memory."""

    blocks: tuple[int, ...]
    case: Case = Case(slots=())
    ratios: tuple[bool, bool] = (False, False)
    spare: int = 1
    heads_first: bool = True
    gap: int = 0
    dtype: torch.dtype = torch.uint8

    def out(self) -> torch.Tensor:
        case = self.case
        first, second = (case.heads, case.page_size) if self.heads_first else (case.page_size, case.heads)
        shape = (len(self.blocks) + self.spare, first, second, 2 * case.head_size + self.gap)
        out = torch.full(shape, 0x55, dtype=self.dtype, device=DEVICE)[..., self.gap :]
        return out if self.heads_first else out.transpose(1, 2)

    def ratio(self) -> list[torch.Tensor | None]:
        generator = self.case.generator()
        shape = (self.case.heads, self.case.head_size)
        # From e4m3's subnormals to beyond its largest value.
        ratios = [torch.exp2(torch.rand(shape, generator=generator) * 22 - 14).to(DEVICE) for _ in range(2)]
        return [ratio if wanted else None for ratio, wanted in zip(ratios, self.ratios, strict=True)]


@st.composite
def expansions(draw: st.DrawFn) -> Expansion:
    case = Case(
        slots=(),
        heads=draw(st.sampled_from([1, 2, 3])),
        head_size=draw(st.sampled_from([64, 128, 256])),
        pages=draw(st.sampled_from([1, 4])),
        page_size=draw(st.sampled_from([1, 16])),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 1000)),
    )
    inside, outside = st.integers(0, case.pages - 1), st.sampled_from([-1, case.pages, 2**31 - 1])
    return Expansion(
        blocks=tuple(draw(st.lists(inside | inside | outside, max_size=4))),
        case=case,
        ratios=(draw(st.booleans()), draw(st.booleans())),
        spare=draw(st.sampled_from([0, 2])),
        heads_first=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 16, 3])),
        dtype=draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float16])),
    )


@settings(max_examples=30 if INTERPRETED else 100, deadline=None, suppress_health_check=list(HealthCheck))
@given(expansions())
@example(Expansion(blocks=()))
@example(Expansion(blocks=(2, 2, 0), ratios=(True, True)))
@example(Expansion(blocks=(2, -1, 0), ratios=(True, True), dtype=torch.bfloat16))
@example(Expansion(blocks=(0, 1), ratios=(True, False), dtype=torch.float16))
@example(Expansion(blocks=(1,), case=Case(slots=(), heads=1, page_size=16, head_size=256), ratios=(False, True)))
def test_expand(expansion: Expansion) -> None:
    from mjolnir.kernels.store import expand_pages

    _, kv = expansion.case.cache()
    blocks = torch.tensor(expansion.blocks, dtype=torch.int32, device=DEVICE)
    expected, actual = expansion.out(), expansion.out()
    e2m3.expand_pages(kv, blocks, expected, *expansion.ratio())
    result = expand_pages(kv, blocks, actual, *expansion.ratio())
    assert torch.equal(actual, expected)
    assert torch.equal(result, expected[: len(blocks)])
    if len(blocks):
        assert result.data_ptr() == actual.data_ptr()


def test_expand_every_code_exactly() -> None:
    from mjolnir.kernels.store import expand_pages

    codes = torch.arange(64, dtype=torch.uint8)
    rows = e2m3.pack(torch.stack([codes, codes.flip(0)]))[:, None, None, None].to(DEVICE)
    out = torch.zeros((1, 1, 1, 128), dtype=torch.uint8, device=DEVICE)
    expand_pages(PagedKV(rows[0], rows[1]), torch.zeros(1, dtype=torch.int64, device=DEVICE), out)
    values = out.cpu().view(torch.float8_e4m3fn).float().flatten()
    assert torch.equal(values, e2m3.decode(torch.cat([codes, codes.flip(0)])))
    assert int(out[0, 0, 0, 32]) == 0x80


def test_expand_rounds_to_even_and_saturates() -> None:
    """Code 8 is 1, so the ratio itself is rounded: every e4m3 value, every middle, and what lies next to it."""
    from mjolnir.kernels.store import expand_pages

    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(limit)) for limit in (999.0, 0.0))
    ratios = torch.cat([values, middles, up, down, torch.tensor([464.0, 465.0, 1e30, 1e-30, 1e-38, 0.0, 1.0])])
    ratio = ratios.view(8, 64).to(DEVICE)
    ones = e2m3.pack(torch.full((1, 1, 8, 64), 8, dtype=torch.uint8)).to(DEVICE)
    minus_ones = e2m3.pack(torch.full((1, 1, 8, 64), 40, dtype=torch.uint8)).to(DEVICE)
    out = torch.zeros((1, 8, 1, 128), dtype=torch.uint8, device=DEVICE)
    expand_pages(PagedKV(ones, minus_ones), torch.zeros(1, dtype=torch.int32, device=DEVICE), out, ratio, ratio)
    expected = ratio.clamp(max=448).cpu().to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out[0, :, 0, :64].cpu(), expected)
    assert torch.equal(out[0, :, 0, 64:].cpu(), expected | 0x80)


def test_largest_scaled_value_expands_to_448() -> None:
    """Spec 4.8: with S = s * 7.5 / 448 the largest code becomes e4m3's largest, and nothing exceeds it."""
    from mjolnir.kernels.store import expand_pages, write_kv

    case = Case(slots=(0,), heads=1)
    amax = torch.rand((1, 64), generator=case.generator()).to(DEVICE) + 0.1
    scale = amax / 7.5
    fallback = scale.max() * 7.5 / 448
    _, kv = case.cache()
    rows = amax.view(1, 1, 64)
    write_kv(rows, -rows, kv, case.slot_mapping(), scale, scale)
    out = torch.zeros((1, 1, 4, 128), dtype=torch.uint8, device=DEVICE)
    expand_pages(kv, torch.zeros(1, dtype=torch.int32, device=DEVICE), out, scale / fallback, scale / fallback)
    values = out[0, 0, 0].cpu().view(torch.float8_e4m3fn).double() * float(fallback)
    assert float(values.max() / fallback) == 448
    assert float(values.min() / fallback) == -448
    torch.testing.assert_close(values, torch.cat([rows, -rows], -1).cpu().double().flatten(), rtol=2**-4, atol=0)


def test_refuses_what_does_not_fit() -> None:
    from mjolnir.kernels.store import expand_pages, write_kv

    case = Case(slots=(0,))
    key, value = case.rows()
    _, kv = case.cache()
    one = torch.ones(1, device=DEVICE)
    with pytest.raises(LayoutError, match="cache of 1 heads of 64"):
        write_kv(key[:, :1], value[:, :1], kv, case.slot_mapping(), one, one)
    with pytest.raises(ConfigurationError, match=r"KV scale of shape \(3,\)"):
        write_kv(key, value, kv, case.slot_mapping(), one, torch.ones(3, device=DEVICE))
    with pytest.raises(LayoutError, match=r"\(1,\) pages do not expand into 0"):
        expand_pages(kv, torch.zeros(1, dtype=torch.int32, device=DEVICE), Expansion(blocks=(), spare=0).out())
