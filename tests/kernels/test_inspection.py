"""What is read from machine code: on kernels whose figures are known, on listings, and in the report's page."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mjolnir.errors import ConfigurationError, KernelInspectionError
from mjolnir.kernels import inspection, report
from mjolnir.kernels.compiler import KernelCache, KernelVariant
from mjolnir.kernels.inspection import Listing, count, inspect
from mjolnir.kernels.tuning import StreamTuning
from mjolnir.kernels.variants import Choice, Shape, Strides, decode_variant, merge_variant, shape_of
from mjolnir.runner import RunnerConfig

SM90, SM110 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 110, 32)
needs_sm110 = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7), reason="Triton 3.6's tools do not know sm_110"
)


@gluon.jit
def through_shared(x, block: gl.constexpr, near: gl.constexpr, far: gl.constexpr, shared: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int32, [block], shared, gl.load(x + gl.arange(0, block, layout=near)))
    gl.store(x + gl.arange(0, block, layout=far), memory.load(far))


@triton.jit
def many_sums(x, out, steps, width: tl.constexpr):
    at = tl.arange(0, width)
    total = tl.load(x + at)
    for step in range(steps):
        total = total * total + tl.load(x + step * width + at)
    tl.store(out + at, total)


@triton.jit
def product(a, b, out, steps, rows: tl.constexpr, inner: tl.constexpr):
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, inner)[None, :]
    total = tl.zeros([rows, rows], tl.float32)
    for _ in range(steps):
        total = tl.dot(tl.load(a + row * inner + column), tl.trans(tl.load(b + row * inner + column)), total)
    tl.store(out + row * rows + tl.arange(0, rows)[None, :], total)


def shared_variant(block: int) -> KernelVariant:
    near, far = gl.BlockedLayout([1], [32], [4], [0]), gl.BlockedLayout([2], [32], [4], [0])
    shared = gl.SwizzledSharedLayout(1, 1, 1, [0])
    constants = (("block", block), ("near", near), ("far", far), ("shared", shared))
    return KernelVariant(through_shared, (("x", "*i32"),), constants, f"shared {block}")


def sums_variant(maxnreg: int | None, width: int = 8192) -> KernelVariant:
    arguments = (("x", "*fp32"), ("out", "*fp32"), ("steps", "i32"))
    return KernelVariant(
        many_sums, arguments, (("width", width),), "sums", aligned=("x", "out"), num_warps=4, maxnreg=maxnreg
    )


def product_variant() -> KernelVariant:
    arguments = (("a", "*fp16"), ("b", "*fp16"), ("out", "*fp32"), ("steps", "i32"))
    return KernelVariant(product, arguments, (("rows", 16), ("inner", 64)), "product", aligned=("a", "b"), num_warps=1)


def decode_shape() -> tuple[Shape, Choice]:
    """32:8 heads of 128 for one query token over pages of 16, with warps of 8 rows and 16 tokens."""
    config = RunnerConfig(32, 8, 128, 16, torch.bfloat16, 64, torch.device("cuda"), q_dtype="bf16")
    tuning = StreamTuning(warps=2, rows=8, tokens=16)
    strides = Strides(4096, 128, 4096, 128, page=8192, head=1024, token=64)
    return shape_of(config, 1, 20, tuning=tuning), Choice(1, True, False, False, False, torch.bfloat16, strides)


@pytest.fixture(scope="module")
def cache() -> KernelCache:
    return KernelCache(None)


class TestKernels:
    @pytest.mark.parametrize("block", [256, 1024])
    def test_shared_memory_is_what_the_kernel_asks_for(self, cache, block):
        found = inspect(cache.get(shared_variant(block), SM90))
        assert found.shared_bytes == 4 * block
        assert found.instructions["STS"] + found.instructions["STSM"] > 0
        assert found.instructions["LDS"] > 0
        assert (found.name, found.arch, found.threads, found.hot_loop) == ("through_shared", 90, 128, None)

    def test_spills_of_a_kernel_with_too_few_registers(self, cache):
        free, tight = (inspect(cache.get(sums_variant(maxnreg), SM90)) for maxnreg in (None, 32))
        assert free.local_bytes == 0
        assert free.registers > 64  # 64 sums a thread
        assert free.instructions["STL"] == 0
        assert tight.registers <= 32
        assert tight.local_bytes >= 4 * 32
        assert tight.instructions["STL"] > 0
        assert tight.instructions["LDL"] > 0

    def test_wide_loads_are_told_from_narrow_ones(self, cache):
        """8192 floats of 128 threads: 16 loads of four a thread, ahead of the loop and in it."""
        found = inspect(cache.get(sums_variant(None), SM90))
        assert found.instructions["LDG.128"] % 16 == 0
        assert found.instructions["LDG.128"] >= 32
        assert found.instructions["LDG other"] == 0
        assert found.instructions["STG"] == 16
        assert found.instructions.matrix == 0

    @pytest.mark.parametrize("target", [SM90, pytest.param(SM110, marks=needs_sm110)])
    def test_loop_that_multiplies_matrices(self, cache, target):
        """16 x 16 x 64 are 2 x 4 products of 16 x 8 x 16."""
        found = inspect(cache.get(product_variant(), target))
        assert found.arch == target.arch
        assert found.hot_loop is not None
        assert found.hot_loop["HMMA"] % 8 == 0
        assert 8 <= found.hot_loop["HMMA"] <= found.instructions["HMMA"]
        assert 0 < found.hot_loop.total < found.instructions.total

    def test_unknown_kind_is_an_error_and_not_zero(self, cache):
        with pytest.raises(KeyError, match="LDGG"):
            inspect(cache.get(product_variant(), SM90)).instructions["LDGG"]


LISTING = """
	.target	sm_110a
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P6 LDG.E.128 R4, desc[UR6][R2.64] ;
.L_x_0:
        /*0020*/                   LDG.E.U8 R4, desc[UR6][R2.64] ;
.L_x_1:
        /*0030*/                   LDG.E.LTC128B.U8 R4, desc[UR6][R2.64] ;
        /*0040*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0050*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0060*/                   SHFL.BFLY PT, R4, R9, 0x1, 0x1f ;
        /*0070*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0080*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0090*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
        /*00a0*/                   PRMT R4, R4, 0x5410, R5 ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00c0*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11] ;
        /*00d0*/               @P1 BRA.U UP0, `(.L_x_0) ;
        /*00e0*/                   BRA `(.L_x_4) ;
.L_x_4:
        /*00f0*/                   EXIT ;
.L_x_5:
        /*0100*/                   BRA `(.L_x_5);
        /*0110*/                   NOP;
"""


class TestListing:
    def test_kinds(self):
        counts = Listing(LISTING).counts
        assert dict(counts.by_kind) == {
            "LDG.128": 1, "LDG other": 2, "HMMA": 4, "UTCMMA": 1, "PRMT": 1, "SHFL": 1, "BAR": 1,
        }  # fmt: skip
        assert counts.total == 17
        assert counts.matrix == 5

    def test_loops_end_in_a_branch_back(self):
        assert Listing(LISTING).loops == [range(3, 8), range(2, 14)]

    def test_hot_loop_is_the_innermost_with_matrix_products(self):
        hot = Listing(LISTING).hot_loop
        assert hot is not None
        assert (hot.total, hot["HMMA"], hot["SHFL"], hot["UTCMMA"]) == (5, 2, 1, 0)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("LDG.E.128.CONSTANT", "LDG.128"),
            ("LDG.E.EF.128", "LDG.128"),
            ("LDG.E.64", "LDG other"),
            ("LDGSTS.E.BYPASS.128", "LDGSTS"),
            ("LDS.128", "LDS"),
            ("LDSM.16.M88.4", "LDSM"),
            ("STS.U8", "STS"),
            ("QGMMA.64x16x32.F32.E4M3.E4M3", "GMMA"),
            ("HGMMA.64x64x16.F32", "GMMA"),
            ("QMMA.16832.F32.E4M3.E4M3", "QMMA"),
            ("UTCQMMA.2CTA", "UTCMMA"),
            ("F2FP.F16.E4M3.UNPACK_B", "F2FP"),
            ("SYNCS.ARRIVE.TRANS64", "SYNCS"),
        ],
    )
    def test_kind_of_a_name(self, name, kind):
        assert count([name]).by_kind == ((kind, 1),)


class TestTools:
    def test_missing_disassembler_is_named(self, cache, monkeypatch, tmp_path):
        monkeypatch.setattr(inspection, "BINARIES", tmp_path)
        with pytest.raises(KernelInspectionError, match=r"cuobjdump: .*No such file"):
            inspect(cache.get(product_variant(), SM90))

    def test_failing_disassembler_says_why(self, cache, monkeypatch, tmp_path):
        """Triton 3.6's nvdisasm stops at sm_110."""
        (tmp_path / "cuobjdump").write_text("#!/bin/sh\necho \"Cannot decode architecture 'SM110'\" >&2\nexit 1\n")
        (tmp_path / "cuobjdump").chmod(0o755)
        monkeypatch.setattr(inspection, "BINARIES", tmp_path)
        with pytest.raises(KernelInspectionError, match="cuobjdump: Cannot decode architecture 'SM110'"):
            inspect(cache.get(product_variant(), SM90))


class TestReport:
    @needs_sm110
    def test_row_of_the_decode_kernel(self, cache):
        ((label, found),) = report.inspect_variants([decode_variant(*decode_shape())], 110, cache)
        header, _, row = report.table([(label, found)]).splitlines()
        cells = dict(zip(re.findall(r"[^|]+", header), re.findall(r"[^|]+", row), strict=True))
        cells = {name.strip(): cell.strip() for name, cell in cells.items()}
        assert (cells["kernel"], cells["sm"], cells["spilled B"]) == (label, "110", "0")
        assert label == "32:8 d 128 fp8, page 16, q_len 1"
        assert found.hot_loop is not None
        # A warp's 16 tokens x 8 rows x 128 channels, twice.
        assert int(cells["MMA"]) == 2 * (16 // 16) * (8 // 8) * (128 // 16) == found.hot_loop.matrix
        assert int(cells["in the loop"]) == found.hot_loop.total
        assert int(cells["registers"]) == found.registers

    def test_kernel_without_matrix_products_is_counted_whole(self, cache):
        results = report.inspect_variants([merge_variant(*decode_shape())], 90, cache)
        cells = [cell.strip() for cell in report.table(results).splitlines()[-1].strip("|").split("|")]
        found = results[0][1]
        assert cells[:2] == ["merge 32:8 d 128 fp8, page 16, q_len 1", "90"]
        assert cells[6] == "-"
        assert cells[7] == str(found.instructions["LDG.128"])

    @needs_sm110
    def test_table_is_written_between_the_marks(self, cache, monkeypatch, tmp_path):
        monkeypatch.setattr(report, "shipped_variants", lambda arch: [product_variant()])
        page = tmp_path / "kernels.md"
        page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
        assert report.main(["--write", str(page)]) == 0
        before, _, header, _, *rows, _, after = page.read_text().splitlines()
        assert (before, after) == ("before", "after")
        assert header.startswith("| kernel | sm |")
        assert [row.split(" | ")[:2] for row in rows] == [["| product", "90"], ["| product", "110"]]
        again = page.read_text()
        assert report.replace_section(again, "\n".join([header, report.table([]).splitlines()[1], *rows])) == again

    @pytest.mark.parametrize(
        "page", ["", report.BEGIN, report.END + report.BEGIN, report.BEGIN + report.BEGIN + report.END]
    )
    def test_page_without_its_marks_is_refused(self, page):
        with pytest.raises(ConfigurationError, match="kernels:begin"):
            report.replace_section(page, "table")
