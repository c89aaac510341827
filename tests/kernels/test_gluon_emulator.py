"""The Gluon emulator on small kernels whose results torch, or a few written-out figures, can tell."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tests.kernels import gluon_ops
from tests.kernels.gluon_emulator import emulate

LINE = gl.BlockedLayout([1], [32], [4], [0])
CUBE = gl.BlockedLayout([1, 1, 1], [1, 4, 8], [4, 1, 1], [2, 1, 0])
MMA = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
FROM_E4M3 = gl.constexpr(
    "{.reg .b32 a,b; .reg .b16 lo,hi; mov.b32 {lo,hi}, $4; cvt.rn.f16x2.e4m3x2 a, lo; "
    "cvt.rn.f16x2.e4m3x2 b, hi; mov.b32 {$0,$1}, a; mov.b32 {$2,$3}, b;}"
)


@gluon.jit
def add_vectors(x_ptr, y_ptr, out_ptr, n, block: gl.constexpr, layout: gl.constexpr):
    gdc_wait()
    i = gl.program_id(0) * block + gl.arange(0, block, layout=layout)
    x = gl.load(x_ptr + i, mask=i < n, other=0.0)
    y = gl.load(y_ptr + i, mask=i < n)
    gl.store(out_ptr + i, x + y, mask=i < n)
    gdc_launch_dependents()


def test_vector_add_masks_the_tail() -> None:
    x, y = torch.randn(2, 100)
    out = torch.full((128,), 777.0)
    emulate(add_vectors, (4,), x, y, out, 100, block=32, layout=LINE, num_warps=4)
    assert torch.equal(out[:100], x + y)
    assert (out[100:] == 777).all()


def test_masked_elements_without_other_are_nan() -> None:
    @gluon.jit
    def copy(x_ptr, out_ptr, layout: gl.constexpr):
        i = gl.arange(0, 4, layout=layout)
        gl.store(out_ptr + i, gl.load(x_ptr + i, mask=i < 2))

    out = torch.zeros(4)
    emulate(copy, (1,), torch.ones(4), out, LINE)
    assert out.isnan().tolist() == [False, False, True, True]


def test_access_outside_of_the_storage_raises() -> None:
    x, out = torch.randn(100), torch.zeros(128)
    with pytest.raises(IndexError, match="load through y_ptr: element offsets 96 to 127 leave the storage of 100") as e:
        emulate(add_vectors, (4,), torch.zeros(128), x, out, 128, block=32, layout=LINE)
    assert e.value.__notes__ == ["in program (3, 0, 0) of add_vectors"]
    with pytest.raises(IndexError, match="store through out_ptr: element offsets 64 to 95 leave the storage of 64"):
        emulate(add_vectors, (4,), x, x, out[:64].clone(), 100, block=32, layout=LINE)


def test_pointers_start_at_the_offset_of_a_view() -> None:
    storage = torch.arange(200.0)
    out = torch.zeros(32)
    emulate(add_vectors, (1,), storage[100:], storage.view(torch.int32).view(torch.float32)[7:], out, 32, 32, LINE)
    assert torch.equal(out, torch.arange(100.0, 132.0) + torch.arange(7.0, 39.0))


@gluon.jit
def cube(rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    r = gl.arange(0, rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    c = gl.arange(0, columns, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    w = gl.expand_dims(gl.expand_dims(w, 1), 2)
    r = gl.expand_dims(gl.expand_dims(r, 0), 2)
    return (w * rows + r) * columns + gl.expand_dims(gl.expand_dims(c, 0), 0)


@gluon.jit
def multiply(a_ptr, b_ptr, out_ptr, mma: gl.constexpr):
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    a = gl.load(a_ptr + cube(16, 32, left))
    b = gl.load(b_ptr + cube(32, 8, right))
    acc = gl.full([4, 16, 8], 1.0, gl.float32, layout=mma)
    gl.store(out_ptr + cube(16, 8, mma), mma_v2(a, b, acc))


def test_batched_mma_accumulates_in_float32() -> None:
    a, b = torch.randn(4, 16, 32).half(), torch.randn(4, 32, 8).half()
    a[0], b[0] = 256, 256  # 32 * 65536 and the 1 below it: neither fits f16
    out = torch.zeros(4, 16, 8)
    emulate(multiply, (1,), a, b, out, MMA)
    torch.testing.assert_close(out.double(), 1 + a.double() @ b.double(), atol=1e-5, rtol=0)
    assert out[0, 0, 0] == 2097153


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _compose(m, n, p, q):  # x -> m x + n, then x -> p x + q
    return m * p, n * p + q


@gluon.jit
def scan(x_ptr, sum_ptr, reverse_ptr, affine_ptr, layout: gl.constexpr):
    i = gl.arange(0, 64, layout=layout)
    x = gl.load(x_ptr + i)
    gl.store(sum_ptr + i, gl.associative_scan(x, 0, _add))
    gl.store(reverse_ptr + i, gl.associative_scan(x, 0, _add, reverse=True))
    _, last = gl.associative_scan((x * 0 + 3, x), 0, _compose)
    gl.store(affine_ptr + i, last)


def test_associative_scan() -> None:
    x = torch.randint(-1000, 1000, (64,), dtype=torch.int32)
    sums, reverse, affine = torch.zeros(3, 64, dtype=torch.int32)
    emulate(scan, (1,), x, sums, reverse, affine, LINE)
    assert sums.tolist() == x.cumsum(0).tolist()
    assert reverse.tolist() == x.flip(0).cumsum(0).flip(0).tolist()
    value, expected = 0, []
    for element in x.tolist():
        value = value * 3 + element
        expected.append((value + 2**31) % 2**32 - 2**31)  # int32 wraps
    assert affine.tolist() == expected


@gluon.jit
def collatz(start_ptr, steps_ptr, peak_ptr, limit: gl.constexpr):
    for program in range(gl.program_id(0), gl.num_programs(0) + gl.load(start_ptr) * 0, 2):
        n = gl.load(start_ptr + program)
        steps = n * 0
        peak = n
        while (n != 1) & (steps < limit):
            if n % 2 == 0:  # noqa: SIM108 - if and else are what is tested
                n = n // 2
            else:
                n = 3 * n + 1
            peak = max(peak, n)
            steps += 1
        for _ in gl.static_range(2):
            gl.atomic_add(steps_ptr + program, steps)
        gl.store(peak_ptr + program, peak)


def test_loops_and_branches_on_scalars() -> None:
    steps, peaks = torch.zeros(2, 4, dtype=torch.int32)
    emulate(collatz, (4,), torch.tensor([1, 6, 7, 27], dtype=torch.int32), steps, peaks, 1000)
    # Programs 0 and 2 both count 7, programs 1 and 3 both count 27; each twice.
    assert steps.tolist() == [2 * 0, 2 * 8, 4 * 16, 4 * 111]
    assert peaks.tolist() == [1, 16, 52, 9232]


@gluon.jit
def widen(words_ptr, out_ptr, words: gl.constexpr, layout: gl.constexpr):
    i = gl.arange(0, words, layout=layout)
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        FROM_E4M3,
        "=&h,=&h,=&h,=&h,r",
        [gl.load(words_ptr + i)],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    halves = gl.join(gl.join(f0, f2), gl.join(f1, f3))  # [word, half, byte of the half]
    values = gl.reshape(halves, [words * 4])
    o = gl.arange(0, words * 4, layout=values.type.layout)
    gl.store(out_ptr + o, values)


def e4m3x4_to_f16(word: torch.Tensor) -> tuple[torch.Tensor, ...]:
    byte = [(word >> shift & 255).to(torch.uint8) for shift in (0, 8, 16, 24)]
    return tuple(b.view(torch.float8_e4m3fn).half() for b in byte)


def test_inline_asm_runs_the_registered_function(monkeypatch) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256, dtype=torch.float16)
    monkeypatch.setattr(gluon_ops, "ASM", {})
    with pytest.raises(NotImplementedError, match=r"no emulate.register_asm for: \{.reg .b32 a,b;"):
        emulate(widen, (1,), codes.view(torch.int32), out, words=64, layout=LINE)
    emulate.register_asm(FROM_E4M3, e4m3x4_to_f16)
    emulate(widen, (1,), codes.view(torch.int32), out, words=64, layout=LINE)
    torch.testing.assert_close(out, codes.view(torch.float8_e4m3fn).half(), atol=0, rtol=0, equal_nan=True)


@gluon.jit
def last_adds(x_ptr, parts_ptr, counter_ptr, out_ptr, block: gl.constexpr, layout: gl.constexpr):
    pid = gl.program_id(0)
    x = gl.load(x_ptr + pid * block + gl.arange(0, block, layout=layout))
    gl.store(parts_ptr + pid, gl.sum(x, 0))
    gl.barrier()
    arrived = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if arrived == gl.num_programs(0) - 1:
        total = 0.0
        for i in range(gl.num_programs(0)):
            total += gl.load(parts_ptr + i)
        gl.store(out_ptr, total)
        gl.store(out_ptr + 1, arrived.to(gl.float32))
        gl.store(counter_ptr, 0)


def test_last_arriver_sees_the_others() -> None:
    x = torch.arange(320.0)
    parts, out, counter = torch.full((5,), float("nan")), torch.zeros(2), torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        emulate(last_adds, (5,), x, parts, counter, out, 64, LINE)
        assert out.tolist() == [319 * 320 / 2, 4]
        assert counter.item() == 0


def test_atomic_add_on_shared_addresses() -> None:
    @gluon.jit
    def count(bins_ptr, total_ptr, found_ptr, layout: gl.constexpr):
        i = gl.arange(0, 8, layout=layout)
        bins = gl.load(bins_ptr + i)
        gl.store(found_ptr + i, gl.atomic_add(total_ptr + bins, i + 1, mask=i != 6), mask=i != 6)

    total = torch.tensor([100, 200, 300], dtype=torch.int32)
    found = torch.full((8,), -1, dtype=torch.int32)
    emulate(count, (1,), torch.tensor([0, 2, 0, 1, 2, 0, 0, 2], dtype=torch.int32), total, found, LINE)
    assert total.tolist() == [100 + 1 + 3 + 6, 200 + 4, 300 + 2 + 5 + 8]
    assert found.tolist() == [100, 300, 101, 200, 302, 104, -1, 307]


@gluon.jit
def integers(x_ptr, out_ptr, layout: gl.constexpr):
    i = gl.arange(0, 4, layout=layout)
    x = gl.load(x_ptr + i)
    u = x.to(gl.uint32, bitcast=True)
    gl.store(out_ptr + i, x // 4)
    gl.store(out_ptr + 4 + i, x % 4)
    gl.store(out_ptr + 8 + i, x * 65537)
    gl.store(out_ptr + 12 + i, x >> 1)
    gl.store(out_ptr + 16 + i, (u >> 1).to(gl.int32, bitcast=True))
    gl.store(out_ptr + 20 + i, (u * 65537).to(gl.int32, bitcast=True))
    gl.store(out_ptr + 24 + i, ~x ^ (x << 4 | 3))


def test_integers_behave_as_in_c() -> None:
    x = [-7, 7, 2**31 - 1, -(2**31)]
    out = torch.zeros(7, 4, dtype=torch.int32)
    emulate(integers, (1,), torch.tensor(x, dtype=torch.int32), out, LINE)

    def int32(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    assert out.tolist() == [
        [-1, 1, 2**29 - 1, -(2**29)],
        [-3, 3, 3, 0],
        [int32(v * 65537) for v in x],
        [v >> 1 for v in x],
        [v % 2**32 >> 1 for v in x],
        [int32(v * 65537) for v in x],
        [int32(~v ^ (v << 4 | 3)) for v in x],
    ]


@gluon.jit
def types(out_ptr, layout: gl.constexpr):
    half = gl.full([2], 3.0, gl.float16, layout=layout)
    wide = gl.full([2], 1, gl.int64, layout=layout)
    gl.static_assert((half * 2.5).dtype == gl.float16)
    gl.static_assert((half / 2.0).dtype == gl.float32)
    gl.static_assert(gl.where(half > 2, half, -float("inf")).dtype == gl.float16)
    gl.static_assert((gl.program_id(0) + wide).dtype == gl.int64)
    gl.static_assert(gl.sum(half > 2.0, 0).dtype == gl.uint32)
    gl.static_assert(gl.max(half, 0).dtype == gl.float32)
    gl.static_assert(out_ptr.dtype.element_ty == gl.float8e4nv)
    value = (half * 1000).to(out_ptr.dtype.element_ty)  # 3000: past the largest e4m3
    gl.store(out_ptr + gl.arange(0, 2, layout=layout), value)


def test_types_follow_triton() -> None:
    out = torch.zeros(2, dtype=torch.float8_e4m3fn)
    emulate(types, (1,), out, LINE)
    assert out.float().tolist() == [448, 448]


def test_ranks_are_not_broadcast() -> None:
    @gluon.jit
    def mismatch(layout: gl.constexpr):
        i = gl.arange(0, 4, layout=layout)
        gl.expand_dims(i, 1) + i

    with pytest.raises(ValueError, match=r"rank mismatch: \[\[4, 1\], \[4\]\]"):
        emulate(mismatch, (1,), LINE)


def test_what_is_not_emulated_says_so() -> None:
    @gluon.jit
    def histogram(layout: gl.constexpr):
        gl.histogram(gl.arange(0, 128, layout=layout), 4, layout=layout)

    with pytest.raises(NotImplementedError, match="histogram is not emulated"):
        emulate(histogram, (1,), LINE)
