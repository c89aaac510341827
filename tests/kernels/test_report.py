"""The machine code of the shipped kernels: nothing spills that did not, wide loads, one wave; and the page's table."""

import functools
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget

from mjolnir.kernels import report
from mjolnir.kernels.compiler import KernelCache
from mjolnir.kernels.inspection import KernelInspection
from mjolnir.kernels.shipped import ShippedVariant, shipped
from mjolnir.kernels.variants import WIDE_TILE, WIDE_WARPS, Shape

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
PINNED = "3.7.1"  # what the page's numbers were made with
ARCHITECTURES = [
    90,
    pytest.param(
        110,
        marks=pytest.mark.skipif(
            tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7), reason="Triton 3.6's tools do not know sm_110"
        ),
    ),
]
# Of an SM, on both architectures; a program costs 1 KiB of shared memory on top of its own.
SHARED_BYTES, RESERVED_BYTES, REGISTERS = 228 * 1024, 1024, 65536
WORKERS = 2
# Bytes that a thread spills, at most; a variant that is not here spills none. They have 255 registers already,
# or 168, their cap; most are merging: what the merge needs is kept beside the loop's sums.
SPILLED = {
    (90, "24:4 d 256 e2m3, page 128, q_len 1, merging"): 8,
    (90, "24:4 d 256 fp8, page 128, q_len 4"): 40,
    (90, "24:4 d 256 fp8, page 128, q_len 4, merging"): 24,
    (90, "24:4 d 256 fp8, page 16, q_len 2, merging"): 16,
    (90, "24:4 d 256 fp8, page 16, q_len 4"): 32,
    (90, "24:4 d 256 fp8, page 16, q_len 4, merging"): 40,
    (90, "32:8 d 128 fp8, page 128, q_len 4"): 8,
    (90, "32:8 d 128 fp8, page 16, q_len 4, merging"): 24,
    (90, "64:8 d 128 fp8, page 128, q_len 4"): 8,
    (90, "64:8 d 128 fp8, page 128, q_len 4, merging"): 24,
    (90, "64:8 d 128 fp8, page 16, q_len 2, merging"): 24,
    (90, "64:8 d 128 fp8, page 16, q_len 4"): 16,
    (90, "64:8 d 128 fp8, page 16, q_len 4, merging"): 16,
    (90, "9:3 d 64 fp8, page 16, q_len 1, merging"): 16,
    (110, "24:4 d 256 e2m3, page 128, q_len 1, merging"): 16,
    (110, "24:4 d 256 e2m3, page 16, q_len 1, merging"): 16,
    (110, "24:4 d 256 fp8, page 128, q_len 1"): 8,
    (110, "24:4 d 256 fp8, page 128, q_len 1, merging"): 8,
    (110, "24:4 d 256 fp8, page 16, q_len 1"): 8,
    (110, "24:4 d 256 fp8, page 16, q_len 1, merging"): 8,
}
# Local loads and stores in the loop.
SPILLED_IN_LOOP: dict[tuple[int, str], int] = {}


@functools.cache
def variants_for(arch: int) -> list[ShippedVariant]:
    """For Thor not every page size and query length, to save time, but every configuration."""
    found = shipped(arch)
    if arch == 90:
        return found
    few = [
        each for each in found if not each.shape or (each.shape.config.page_size == 16 and each.shape.q_len in (1, 4))
    ]
    known = {each.shape.tuning for each in few if each.shape}
    return few + [each for each in found if each.shape and each.shape.tuning not in known]


@functools.cache
def inspections(arch: int) -> dict[str, tuple[ShippedVariant, KernelInspection]]:
    """By label; about a minute for an architecture."""
    variants = variants_for(arch)
    found = report.inspect_variants([each.variant for each in variants], arch, KernelCache(None), workers=WORKERS)
    return {label: (each, what) for each, (label, what) in zip(variants, found, strict=True)}


def decode_kernels(arch: int) -> dict[str, tuple[Shape, KernelInspection]]:
    """Shape and inspection of the decode kernels' variants."""
    return {
        label: (each.shape, found)
        for label, (each, found) in inspections(arch).items()
        if each.shape and each.variant.kernel.__name__ in {"stream_kernel", "wide_kernel", "wgmma_kernel"}
    }


@pytest.mark.parametrize("arch", [90, 110])
def test_every_variant_is_shipped_once_under_a_label_of_its_own(arch: int) -> None:
    found = shipped(arch)
    target = GPUTarget("cuda", arch, 32)
    assert len({each.variant.label for each in found}) == len(found)
    assert len({each.variant.key(target) for each in found}) == len(found)
    kernels = {each.variant.kernel.__name__ for each in found}
    decode = {"stream_kernel", "wgmma_kernel"} if arch == 90 else {"stream_kernel", "wide_kernel"}
    assert kernels == decode | {"merge_kernel", "write_kernel", "expand_kernel"}
    assert {each.shape.tuning for each in found if each.shape} == {
        each.shape.tuning for each in variants_for(arch) if each.shape
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
class TestMachineCode:
    def test_nothing_spills_that_did_not(self, arch: int) -> None:
        spilled = {label: found.local_bytes for label, (_, found) in inspections(arch).items() if found.local_bytes}
        assert {label: n for label, n in spilled.items() if n > SPILLED.get((arch, label), 0)} == {}

    def test_loop_does_not_touch_local_memory(self, arch: int) -> None:
        touching = {}
        for label, (_, found) in decode_kernels(arch).items():
            assert found.hot_loop is not None, label
            count = found.hot_loop["LDL"] + found.hot_loop["STL"]
            if count > SPILLED_IN_LOOP.get((arch, label), 0):
                touching[label] = count
        assert touching == {}

    def test_programs_of_an_sm_fit_it(self, arch: int) -> None:
        """Else the grid, one wave by design, would run in two."""
        for label, (shape, found) in decode_kernels(arch).items():
            programs = shape.tuning.programs_per_sm
            assert (found.shared_bytes + RESERVED_BYTES) * programs <= SHARED_BYTES, label
            allocated = -(-found.registers // 8) * 8  # registers come in eights
            assert allocated * found.threads * programs <= REGISTERS, label

    def test_loop_multiplies_each_tile_once(self, arch: int) -> None:
        """By mma.sync, 16 x 8 x 16 each, or by wgmma: K Q^T and V^T P^T."""
        for label, (shape, found) in decode_kernels(arch).items():
            tuning, d = shape.tuning, shape.config.head_size
            assert found.hot_loop is not None, label
            if tuning.kernel == "wgmma":
                # 64 tokens x 32 channels each, for either term of the query; 64 channels x 16 tokens each.
                scores, sums = 2 * tuning.tokens // 64 * d // 32, d // 64 * tuning.tokens // 16
                assert found.hot_loop["GMMA"] == found.hot_loop.matrix == scores + sums, label
                continue
            per_warp = (
                WIDE_TILE * tuning.rows * d // WIDE_WARPS
                if tuning.kernel == "wide"
                else tuning.tokens * tuning.rows * d
            )  # of either product
            assert found.hot_loop["HMMA"] == found.hot_loop.matrix == 2 * per_warp // (16 * 8 * 16), label

    def test_wgmma_kernel_copies_16_bytes_at_a_time_and_converts_v_alone(self, arch: int) -> None:
        for label, (shape, found) in decode_kernels(arch).items():
            if shape.tuning.kernel != "wgmma":
                continue
            loop, tokens, d = found.hot_loop, shape.tuning.tokens, shape.config.head_size
            assert loop is not None, label
            assert loop["LDGSTS"] == 2 * tokens * d // (found.threads * 16), label  # K and V
            assert loop["LDSM"] == tokens * d // (found.threads * 16), label  # V, transposed on the way
            assert loop["PRMT"] == tokens * d // (found.threads * 4), label  # one for two tokens of two channels
            weights = tokens * shape.rows // (found.threads * 2)  # once more where a new maximum is needed
            assert loop["F2FP"] == tokens * d // (found.threads * 2) + 2 * weights, label

    def test_stream_kernel_loads_16_bytes_at_a_time_and_nothing_from_shared_memory(self, arch: int) -> None:
        for label, (shape, found) in decode_kernels(arch).items():
            if shape.tuning.kernel != "stream":
                continue
            loop = found.hot_loop
            assert loop is not None, label
            assert [loop[kind] for kind in ("LDS", "LDSM", "STS", "STSM", "BAR")] == [0] * 5, label
            if shape.config.kv_format == "fp8" and shape.config.head_size >= 128:
                # Of K and V, by 32 lanes. The other load is of the block table.
                assert loop["LDG.128"] == 2 * shape.tuning.tokens * shape.config.head_size // (32 * 16), label
                assert loop["LDG other"] == 1, label

    def test_wide_kernel_loads_k_16_bytes_at_a_time(self, arch: int) -> None:
        for label, (shape, found) in decode_kernels(arch).items():
            if shape.tuning.kernel == "wide":
                assert found.hot_loop is not None, label
                wide = WIDE_TILE * shape.config.head_size // (WIDE_WARPS * 32 * 16)
                assert found.hot_loop["LDG.128"] >= wide, label


def rows_of_the_page() -> list[list[str]]:
    lines = PAGE.read_text().split(report.BEGIN)[1].split(report.END)[0].strip().splitlines()
    assert lines[:2] == report.table([]).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_table_of_the_page_has_the_shipped_kernels() -> None:
    """Else: ``python -m mjolnir.kernels.report --write docs/kernels.md``."""
    expected = [(each.variant.label, str(arch)) for arch in report.ARCHITECTURES for each in shipped(arch)]
    assert [(row[0], row[1]) for row in rows_of_the_page()] == sorted(expected, key=lambda row: row[0])


def test_spills_are_those_that_the_page_tells_of() -> None:
    """Also of the variants that are not compiled here; and what no longer spills leaves the list."""
    assert {(int(row[1]), row[0]): int(row[3]) for row in rows_of_the_page() if row[3] != "0"} == SPILLED


@pytest.mark.skipif(triton.__version__ != PINNED, reason=f"other versions of ptxas than Triton {PINNED}'s differ")
@pytest.mark.parametrize("arch", [90, 110])
def test_numbers_of_the_page_are_those_of_the_shipped_kernels(arch: int) -> None:
    written = {row[0]: row for row in rows_of_the_page() if row[1] == str(arch)}
    for label, (_, found) in inspections(arch).items():
        line = report.table([(label, found)]).splitlines()[2]
        assert written[label] == [cell.strip() for cell in line.strip("|").split("|")]
