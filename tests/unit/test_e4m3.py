"""e4m3 on a CPU: every byte through every path, and rounding as the format wants it."""

import math

import pytest
import torch

from mjolnir.reference import e4m3

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def value_of(byte: int) -> float:
    """The value that sign, four exponent bits with bias 7 and three mantissa bits stand for."""
    sign, exponent, mantissa = (-1.0) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = torch.tensor([value_of(byte) for byte in range(256)], dtype=torch.float32)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, the sign of zero included; any NaN equals any other."""
    nan = expected.isnan()
    return bool(
        actual.shape == expected.shape
        and torch.equal(actual.isnan(), nan)
        and torch.equal(actual[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    )


@pytest.fixture(params=["pairs", "bits"])
def path(request, monkeypatch):
    """Force one of the two ways to decode, whatever the size."""
    monkeypatch.setattr(e4m3, "_BITS_FROM", 10**9 if request.param == "pairs" else 1)
    return request.param


@pytest.fixture
def looked_up(monkeypatch):
    """How many bytes went through the table."""
    sizes = []
    look_up = e4m3._look_up_pairs

    def counting(codes):
        sizes.append(codes.numel())
        return look_up(codes)

    monkeypatch.setattr(e4m3, "_look_up_pairs", counting)
    return sizes


def test_all_finite_bytes(path, looked_up):
    finite = ALL_BYTES[~VALUES.isnan()]
    assert finite.numel() == 254
    assert same(e4m3.dequantise(finite), VALUES[finite.long()])
    assert looked_up == ([254] if path == "pairs" else [])


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_nan_bytes(path, nan):
    codes = ALL_BYTES.clone()
    codes[3] = nan
    expected = VALUES.clone()
    expected[3] = math.nan
    assert same(e4m3.dequantise(codes), expected)


def test_every_pair_of_bytes(path):
    """The table has one entry a pair; the two bytes must not change places."""
    pairs = torch.cartesian_prod(ALL_BYTES, ALL_BYTES)
    assert same(e4m3.dequantise(pairs), VALUES[pairs.long()])


def test_agrees_with_torch(path):
    assert same(e4m3.dequantise(ALL_BYTES), ALL_BYTES.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("offset", [-256, 0, 256])
@pytest.mark.parametrize("with_nan", [False, True])
def test_sizes_around_the_threshold(looked_up, offset, with_nan):
    size = e4m3._BITS_FROM + offset
    codes = ALL_BYTES.repeat(size // 256)
    codes[(codes & 0x7F) == 0x7F] = 0
    if with_nan:
        codes[-1] = 0xFF
    expected = VALUES[codes.long()]
    assert same(e4m3.dequantise(codes.view(-1, 64)), expected.view(-1, 64))
    assert looked_up == ([size] if with_nan or offset < 0 else [])


@pytest.mark.parametrize("shape", [(0, 64), (1, 2), (3, 2, 64), (2, 1, 5, 16)])
def test_shapes(path, shape):
    codes = ALL_BYTES.repeat(8)[: math.prod(shape)].view(shape)
    assert same(e4m3.dequantise(codes), VALUES[codes.long()])


def test_input_is_left_alone(path):
    codes = ALL_BYTES.clone()
    e4m3.dequantise(codes)
    assert torch.equal(codes, ALL_BYTES)


def test_quantise_is_the_inverse_on_every_finite_value():
    finite = ALL_BYTES[~VALUES.isnan()]
    assert torch.equal(e4m3.quantise(VALUES[finite.long()]), finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_even_code(dtype):
    """Halfway between each two neighbours; every such value is exact in the dtype."""
    for low in range(0x7E):
        halfway = (value_of(low) + value_of(low + 1)) / 2
        even = low if low % 2 == 0 else low + 1
        values = torch.tensor([halfway, -halfway], dtype=dtype)
        if values[0] == halfway:  # float16 has the halves of the smallest subnormals too
            assert e4m3.quantise(values).tolist() == [even, even | 0x80], halfway


def test_a_hair_beside_a_tie_is_nearest():
    for low in range(0x7E):
        halfway = torch.tensor((value_of(low) + value_of(low + 1)) / 2)
        below, above = torch.nextafter(halfway, torch.tensor(0.0)), torch.nextafter(halfway, torch.tensor(1e9))
        assert e4m3.quantise(torch.stack([below, above])).tolist() == [low, low + 1]


@pytest.mark.parametrize("value", [448.0, 449.0, 464.0, 465.0, 480.0, 1e4, 6e4, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saturates(value, dtype):
    assert e4m3.quantise(torch.tensor([value, -value], dtype=dtype)).tolist() == [0x7E, 0xFE]


def test_nan_stays_nan():
    codes = e4m3.quantise(torch.tensor([math.nan, 1.0, -math.nan]))
    assert [code & 0x7F for code in codes.tolist()] == [0x7F, 0x38, 0x7F]


def test_below_half_the_smallest_value_is_zero():
    assert e4m3.quantise(torch.tensor([2.0**-10, -(2.0**-10), 2.0**-10 * 1.001])).tolist() == [0, 0x80, 1]


def test_largest_value():
    assert e4m3.MAX == 448.0 == VALUES[~VALUES.isnan()].max()
