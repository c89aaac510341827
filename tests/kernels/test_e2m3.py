"""The packed 6-bit KV format on a CPU: values, rounding, packing by hand-made bytes, and the reference's two calls."""

import math

import numpy as np
import pytest
import torch

from mjolnir.errors import ConfigurationError, LayoutError
from mjolnir.layouts import PagedKV, split_kv
from mjolnir.reference import e2m3

ALL_CODES = torch.arange(64, dtype=torch.int32).to(torch.uint8)


def value_of(code: int) -> float:
    """The value that a sign, two exponent bits with bias 1 and three mantissa bits stand for."""
    sign, exponent, mantissa = (-1.0) ** (code >> 5), code >> 3 & 3, code & 7
    return sign * (mantissa / 8 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 1))


VALUES = [value_of(code) for code in range(64)]


def code_of(value: float) -> int:
    return int(e2m3.encode(torch.tensor([value]))[0])


def test_decode_all_codes():
    assert e2m3.decode(ALL_CODES).tolist() == VALUES
    assert math.copysign(1.0, float(e2m3.decode(ALL_CODES)[32])) == -1.0
    assert [min(VALUES), max(VALUES)] == [-7.5, 7.5]


def test_encode_gives_all_codes_back():
    expected = ALL_CODES.clone()
    expected[32] = 0  # negative zero is never produced
    assert torch.equal(e2m3.encode(e2m3.decode(ALL_CODES)), expected)


# Spec 8.2.
@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0625, 0), (0.06251, 1), (0.1875, 1), (0.94, 8), (1.0625, 8), (1.9375, 15), (1.94, 16), (-0.0625, 0),
        (-0.0626, 33), (1.99, 16), (2.125, 16), (2.13, 17), (3.875, 23), (3.88, 24), (4.25, 24), (7.25, 30),
        (7.26, 31), (100.0, 31), (-100.0, 63), (math.nan, 0), (math.inf, 31), (-math.inf, 63), (-0.0, 0), (1e-45, 0),
    ],
)  # fmt: skip
def test_encode_table(value, code):
    assert code_of(value) == code


def test_ties_go_towards_zero_and_anything_above_does_not():
    for code in range(31):
        middle = np.float32((VALUES[code] + VALUES[code + 1]) / 2)
        above = float(np.nextafter(middle, np.float32(np.inf)))
        assert [code_of(float(middle)), code_of(above)] == [code, code + 1]
        assert [code_of(-float(middle)), code_of(-above)] == [code and code + 32, code + 33]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_encode_is_nearest_by_search(dtype):
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(200_000, generator=generator) * 4
    values = (torch.randn(200_000, generator=generator) * spread).to(dtype)
    exact = values.double().numpy()
    magnitudes = np.array(VALUES[:32])
    nearest = np.abs(np.abs(exact)[:, None] - magnitudes).argmin(1)  # the first of two, which is the smaller
    expected = np.where((exact < 0) & (nearest > 0), nearest + 32, nearest)
    assert np.array_equal(e2m3.encode(values).numpy(), expected)


def test_to_e4m3_is_exact():
    codes = e2m3.to_e4m3(ALL_CODES)
    assert codes.view(torch.float8_e4m3fn).float().tolist() == VALUES
    assert bytes(codes[:10].tolist()) == bytes.fromhex("00 20 28 2c 30 32 34 36 38 39")
    assert codes[[31, 32, 33, 63]].tolist() == [0x4F, 0x80, 0xA0, 0xCF]


def test_bytes_of_a_plane_are_e4m3_of_a_64th():
    """What the decode kernel relies on: spec 8.4's trick, for all 64 codes."""
    packed = e2m3.pack(ALL_CODES.repeat_interleave(4).view(64, 4)).int()  # one quad a row
    a, b, c = packed.unbind(-1)
    fourth = (a >> 2 & 0x18) | (b >> 4 & 0x06) | (c << 1 & 0x80) | (c >> 5 & 0x01)
    for byte in (a & 0x9F, b & 0x9F, c & 0x9F, fourth):
        assert (byte.to(torch.uint8).view(torch.float8_e4m3fn).float() * 64).tolist() == VALUES


# sign and magnitude of channels 0..3 of a row of four, and its three bytes.
@pytest.mark.parametrize(
    ("codes", "row"),
    [
        ([1, 2, 3, 0], "01 02 03"),
        ([0, 0, 0, 0b0_00001], "00 00 20"),
        ([0, 0, 0, 0b0_00110], "00 60 00"),
        ([0, 0, 0, 0b0_11000], "60 00 00"),
        ([0, 0, 0, 0b1_00000], "00 00 40"),
        ([0b1_00000, 0, 0, 0b0_10010], "c0 20 00"),
        ([0b1_11111, 0b0_10101, 0b1_01010, 0b0_01001], "bf 15 aa"),
        ([63, 63, 63, 63], "ff ff ff"),
    ],
)
def test_pack_one_quad(codes, row):
    packed = e2m3.pack(torch.tensor(codes, dtype=torch.uint8))
    assert bytes(packed.tolist()) == bytes.fromhex(row)
    assert e2m3.unpack(packed).tolist() == codes


def test_pack_order_of_channels():
    """Row of eight: quads are channels 0, 2, 4, 6 and 1, 3, 5, 7; planes are two bytes each."""
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 0b0_11000, 0b1_00001], dtype=torch.uint8)
    assert bytes(e2m3.pack(codes).tolist()) == bytes.fromhex("61 02 03 04 05 66")


@pytest.mark.parametrize("head_size", [4, 64, 128, 256])
def test_unpack_inverts_pack(head_size):
    codes = torch.randint(0, 64, (5, 3, head_size), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = e2m3.pack(codes)
    assert packed.shape == (5, 3, head_size * 3 // 4)
    assert torch.equal(e2m3.unpack(packed), codes)


def test_row_bytes():
    assert [e2m3.row_bytes(head_size) for head_size in (64, 128, 256)] == [48, 96, 192]


def cache(pages=3, page_size=4, heads=2, head_size=8, fill=0xAA):
    fused = torch.full((pages, heads, page_size, 2 * e2m3.row_bytes(head_size)), fill, dtype=torch.uint8)
    return fused, split_kv(fused, "BHN2D", e2m3.row_bytes(head_size))


def test_write_kv():
    """Slot 6 is row 2 of page 1; -1 and 12 are nowhere; the fourth token is padding."""
    fused, kv = cache()
    key = torch.arange(64.0).view(4, 2, 8) / 16
    scales = torch.tensor([1.0, 2.0]), torch.full((2, 8), 0.5)
    e2m3.write_kv(key, -key, kv, torch.tensor([6, -1, 12]), *scales)
    assert e2m3.decode(e2m3.unpack(kv.k[1, 2, 0])).tolist() == [0.0, 0.0, 0.125, 0.125, 0.25, 0.25, 0.375, 0.375]
    assert e2m3.decode(e2m3.unpack(kv.k[1, 2, 1])).tolist() == [0.25, 0.25, 0.25, 0.375, 0.375, 0.375, 0.375, 0.5]
    assert e2m3.decode(e2m3.unpack(kv.v[1, 2, 0])).tolist() == [-i / 8 if i else 0.0 for i in range(8)]
    fused[1, :, 2] = 0xAA
    assert bool((fused == 0xAA).all())


def test_expand_pages():
    fused, kv = cache(page_size=1, heads=1)
    fused[2, 0, 0] = torch.cat([e2m3.pack(ALL_CODES[8 * part : 8 * part + 8]) for part in (1, 7)])
    out = torch.full((3, 1, 1, 16), 0x55, dtype=torch.uint8)
    expanded = e2m3.expand_pages(kv, torch.tensor([2, -1]), out)
    assert expanded.data_ptr() == out.data_ptr()
    assert expanded.shape == (2, 1, 1, 16)
    assert bytes(expanded[0].flatten().tolist()) == bytes([*range(0x38, 0x40), *range(0xC8, 0xD0)])
    assert not expanded[1].any()
    assert bool((out[2] == 0x55).all())
    ratio = torch.full((1, 8), 448 / 7.5)
    e2m3.expand_pages(kv, torch.tensor([2]), out, ratio, ratio * 10)
    values = out[0, 0, 0].view(torch.float8_e4m3fn).float()
    assert values[0] == 60.0  # 59.73
    assert values[15] == -448.0  # saturated
    floats = torch.zeros((1, 1, 1, 16), dtype=torch.bfloat16)
    e2m3.expand_pages(kv, torch.tensor([2]), floats, ratio, ratio * 10)
    assert floats[0, 0, 0, 0] == 59.75  # one unit in the last place of bf16 is 0.25 here
    assert floats[0, 0, 0, 15] == -4480.0  # 7.5 * 597.3, not saturated


@pytest.mark.parametrize("shape", [(2,), (1, 3), (2, 1), (8, 2), (8,)])
def test_scale_of_a_wrong_shape(shape):
    with pytest.raises(ConfigurationError, match=r"accepted: 1 element, \(3,\) or \(3, 8\)"):
        e2m3.channel_scales(torch.ones(shape), 3, 8)


def test_scale_shapes():
    assert e2m3.channel_scales(torch.tensor(2.0), 2, 4).tolist() == [[2.0] * 4] * 2
    assert e2m3.channel_scales(torch.tensor([2.0]), 1, 4).tolist() == [[2.0] * 4]
    assert e2m3.channel_scales(torch.tensor([2.0, 3.0]), 2, 4).tolist() == [[2.0] * 4, [3.0] * 4]
    per_channel = torch.arange(4.0).view(1, 4)
    assert torch.equal(e2m3.channel_scales(per_channel, 1, 4), per_channel)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: e2m3.row_bytes(6), "multiple of 4 codes; got 6"),
        (lambda: e2m3.pack(ALL_CODES[:6]), "multiple of 4 codes; got 6"),
        (lambda: e2m3.pack(ALL_CODES.int()), "codes are uint8; got torch.int32"),
        (lambda: e2m3.decode(ALL_CODES.int()), "codes are uint8; got torch.int32"),
        (lambda: e2m3.unpack(ALL_CODES), r"multiple of 3 bytes; got torch.uint8 of \(64,\)"),
    ],
)
def test_bad_codes_and_rows(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(2, 16)}, r"key of shape \(2, 16\)"),
        ({"value": torch.zeros(2, 3, 8)}, r"value of shape \(2, 3, 8\)"),
        ({"key": torch.zeros(2, 2, 16)[..., ::2]}, r"key .* unit stride"),
        ({"value": torch.zeros(1, 2, 8)}, r"slot mapping of shape \(2,\) for 1 tokens of value"),
        ({"slot_mapping": torch.zeros(1, 1, dtype=torch.int64)}, r"slot mapping of shape \(1, 1\)"),
        ({"kv": cache(head_size=16)[1]}, r"cache of 2 heads of 8 is uint8 .* got torch.uint8 of \(3, 4, 2, 12\)"),
        ({"kv": cache(heads=3)[1]}, r"cache of 2 heads of 8 is uint8"),
        ({"kv": PagedKV(cache()[1].k, cache()[1].k.contiguous())}, "K and V want the same shape and strides"),
    ],
)
def test_bad_arguments_of_write_kv(changes, message):
    rows = {"key": torch.zeros(2, 2, 8), "value": torch.zeros(2, 2, 8)}
    one = torch.ones(1)
    arguments = {**rows, "kv": cache()[1], "slot_mapping": torch.tensor([0, 1]), "k_scale": one, "v_scale": one}
    with pytest.raises(LayoutError, match=message):
        e2m3.write_kv(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"out": torch.zeros(2, 2, 4, 8, dtype=torch.uint8)}, LayoutError, r"floats \(pages, 2, 4, 16\)"),
        ({"out": torch.zeros(2, 2, 4, 16).int()}, LayoutError, "got torch.int32"),
        ({"src_blocks": torch.tensor([0, 1, 2])}, LayoutError, r"\(3,\) pages do not expand into 2"),
        ({"k_ratio": torch.ones(2)}, ConfigurationError, r"K ratios torch.float32 of shape \(2,\)"),
        ({"v_ratio": torch.ones(2, 8).double()}, ConfigurationError, "V ratios torch.float64"),
    ],
)
def test_bad_arguments_of_expand_pages(changes, error, message):
    arguments = {"kv": cache()[1], "src_blocks": torch.tensor([0]), "out": torch.zeros(2, 2, 4, 16, dtype=torch.uint8)}
    with pytest.raises(error, match=message):
        e2m3.expand_pages(**{**arguments, **changes})
