"""`mjolnir bench kernel`: what a cell reads, what a row says, and which results get no figure. No GPU is needed."""

import json
import sys
import types

import pytest
import torch

from appliance import cli
from mjolnir.bench import graph_timing, kernel_cells, kernel_decode, kernel_peers
from mjolnir.bench.graph_timing import Timing, launches_of_graph, rotated_buffers
from mjolnir.bench.kernel_cells import (
    BALANCED,
    BATCHES,
    SHAPES,
    SKEWED,
    Batch,
    Cell,
    Shape,
    parse_cells,
    uniform,
)
from mjolnir.bench.kernel_decode import KernelBench, Workload, make_pool, measure
from mjolnir.errors import ConfigurationError
from mjolnir.reference import e2m3
from mjolnir.reference.attention import paged_attention
from mjolnir.runner import create_runner

CPU = torch.device("cpu")
SMALL = Shape(6, 2, 64)
RAGGED = Batch("ragged", (70, 5, 33))


class StubTimer:
    """Launches once on every buffer, and says a time."""

    def __init__(self, us: float = 10.0) -> None:
        self.us = us
        self.launched: list[int] = []

    def __call__(self, launch, buffers, out=None) -> Timing:
        if out is not None:
            out.fill_(torch.nan)
        for buffer in range(buffers):
            launch(buffer)
            self.launched.append(buffer)
        return Timing(self.us, self.us - 1, self.us + 1, buffers, buffers - 1)


class OracleRunner:
    """A runner that asks the oracle, so that it can read e2m3 too."""

    def __init__(self, config) -> None:
        self.config = config

    def plan(self, seq_lens, block_table, *, q_len, causal):
        return seq_lens, block_table, q_len, causal

    def replan(self, plan) -> None:
        pass

    def run(self, plan, query, out, kv, k_scale, v_scale, softmax_scale, lse=None) -> None:
        seq_lens, block_table, q_len, causal = plan
        packed = self.config.kv_format == "e2m3"
        k, v = (e2m3.decode(e2m3.unpack(cache)) if packed else cache for cache in (kv.k, kv.v))
        lengths = [q_len] * len(seq_lens)
        scales = {"softmax_scale": softmax_scale, "k_scale": k_scale, "v_scale": v_scale}
        out.copy_(paged_attention(query, k, v, block_table, seq_lens, lengths, causal=causal, **scales)[0])


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    torch.manual_seed(0)
    return make_pool(CPU, 1 << 19)


def run(monkeypatch, *words: str) -> int:
    """Exit code of `mjolnir` with these words."""
    monkeypatch.setattr(sys, "argv", ["mjolnir", *words])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("cell", "size", "footprint"),
    [
        (Cell(SHAPES[0], uniform(1, 4096)), 8_388_608, 8_388_608),
        (Cell(SHAPES[1], uniform(16, 16384)), 536_870_912, 536_870_912),
        (Cell(SHAPES[3], uniform(64, 2048), kv_format="e2m3"), 37_748_736, 37_748_736),
        (Cell(SHAPES[0], SKEWED, page_size=128), 162_816 * 2048, 162_816 * 2048),
        (Cell(SHAPES[0], BALANCED, page_size=128), 162_816 * 2048, 32 * 40 * 128 * 2048),
        (Cell(SHAPES[0], BALANCED, page_size=16), 162_816 * 2048, 162_816 * 2048),
    ],
)
def test_bytes_of_a_cell(cell: Cell, size: int, footprint: int) -> None:
    assert (cell.bytes, cell.footprint) == (size, footprint)


def test_default_cells() -> None:
    cells = parse_cells(kv="fp8")
    assert len(cells) == 4 * 10 * 2 * 2 == len(set(cells))
    assert [str(shape) for shape in SHAPES] == ["32x8x128", "24x4x256", "64x8x128", "9x3x64"]
    assert len(parse_cells()) == 2 * len(cells)
    assert [len(BATCHES[name]) for name in ("all", "quick", "skewed")] == [10, 3, 2]
    assert all(2 * cell.footprint <= kernel_cells.POOL_BYTES for cell in parse_cells(layout="NHD,HND"))
    one = parse_cells("8x2x64", "3", "32", "skewed", "HND", "e2m3")
    assert one == [Cell(Shape(8, 2, 64), batch, 3, 32, "HND", "e2m3") for batch in (SKEWED, BALANCED)]


@pytest.mark.parametrize(
    ("estimate", "buffers", "launches"),
    [
        (10.0, 62, 310),  # 5 rotations of 620 us
        (2.2, 192, 1152),  # 6 of 422 us
        (1.0, 10, 80),  # no more than 8
        (100.0, 62, 62),
        (5000.0, 8, 2),  # Triton's q_len 4
        (2500.0, 62, 3),
    ],
)
def test_launches_of_a_graph(estimate: float, buffers: int, launches: int) -> None:
    assert launches_of_graph(estimate, buffers) == launches


def test_rotations_are_larger_than_the_l2_cache() -> None:
    for cell in parse_cells():
        buffers = rotated_buffers(cell.footprint, kernel_cells.POOL_BYTES)
        # The smallest, e2m3 of one short sequence, ends at the bound of the number of buffers.
        assert buffers * cell.bytes >= (300e6 if cell.kv_format == "fp8" else 220e6)
        assert buffers * cell.footprint <= kernel_cells.POOL_BYTES


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", ["fp8", "e2m3"])
@pytest.mark.parametrize("q_len", [1, 4])
def test_reference_is_the_oracle(pool: torch.Tensor, layout: str, kv_format: str, q_len: int) -> None:
    cell = Cell(SMALL, RAGGED, q_len, 16, layout, kv_format)
    timer = StubTimer()
    result = measure(cell, OracleRunner(cell.config(CPU)), pool, timer=timer)
    assert result.fault == ""
    assert 1e-4 < result.relative_error < 3e-3  # what bf16 rounds away
    assert (result.us, result.low_us, result.high_us) == (10.0, 9.0, 11.0)
    assert len(timer.launched) == pool.numel() // cell.footprint


def test_buffers_are_disjoint_and_shuffled(pool: torch.Tensor) -> None:
    work = Workload(Cell(SMALL, RAGGED), pool)
    assert work.buffers == len(work.tables) == pool.numel() // work.cell.footprint
    pages = torch.cat(work.pages)
    assert len(set(pages.tolist())) == len(pages) == 9 * work.buffers
    assert pages.tolist() != sorted(pages.tolist())
    assert work.tables[1].shape == (3, 5)
    assert work.tables[1][1].tolist() == [int(work.pages[1][5]), 0, 0, 0, 0]
    assert torch.equal(work.query.float(), work.query8.float() * 2)


def test_the_cpu_runner_is_measured(pool: torch.Tensor) -> None:
    cell = Cell(SMALL, RAGGED, 2, 32)
    assert measure(cell, create_runner(cell.config(CPU)), pool, timer=StubTimer()).relative_error < 3e-3


def test_a_wrong_output_gets_no_figure(pool: torch.Tensor) -> None:
    class Unwritten(OracleRunner):
        def run(self, plan, query, out, *rest, **options) -> None:
            pass

    class Drifting(OracleRunner):
        """Right once, and never again."""

        runs = 0

        def run(self, plan, query, out, *rest, **options) -> None:
            super().run(plan, query, out, *rest, **options)
            Drifting.runs += 1
            out *= Drifting.runs

    cell = Cell(SMALL, RAGGED)
    for runner, fault in ((Unwritten, "relative error nan; accepted: 1e-02"), (Drifting, "replays differ from a ")):
        result = measure(cell, runner(cell.config(CPU)), pool, timer=StubTimer())
        assert result.us is None
        assert result.fault.startswith(fault)


def test_a_cell_with_peers(pool: torch.Tensor) -> None:
    """A peer without V's descale is put right by its factor; one that fails twice is asked no more."""
    asked = []

    def without_descale(work: Workload) -> kernel_peers.Launch:
        launch = kernel_decode.t5_launch(work, OracleRunner(work.cell.config(CPU)))

        def run(buffer: int) -> None:
            launch.run(buffer)
            work.out /= work.v_descale

        return kernel_peers.Launch(run, work.out, work.v_descale)

    def failing(work: Workload) -> kernel_peers.Launch:
        asked.append(work.cell)
        raise RuntimeError("unsupported head size\nsecond line")

    bench = KernelBench(
        pool,
        lambda size: size / 1000,
        peers={"halved": without_descale, "failing": failing},
        factory=OracleRunner,
        timer=StubTimer(),
    )
    cells = [Cell(SMALL, RAGGED, page_size=page) for page in (16, 32, 64)] + [Cell(SMALL, RAGGED, kv_format="e2m3")]
    all_rows = list(bench.run(cells))
    assert [[row["kernel"] for row in rows] for rows in all_rows] == [
        ["T5", "halved", "failing"],
        ["T5", "halved", "failing"],
        ["T5", "halved"],
        ["T5"],
    ]
    assert len(asked) == 2
    ours, halved, failed = all_rows[0]
    assert failed["fault"] == "RuntimeError: unsupported head size"
    assert failed["us"] is None
    assert halved["relative_error"] < 4e-3
    assert ours["bytes"] == 108 * 2 * 2 * 64
    assert ours["ceiling_us"] == 27.65
    assert all_rows[3][0]["bytes"] == 108 * 2 * 2 * 48


def test_a_budget_and_a_lost_device_end_it(pool: torch.Tensor) -> None:
    class Lost(OracleRunner):
        def plan(self, *arguments, **options):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cells = [Cell(SMALL, RAGGED, page_size=page) for page in (16, 32)]
    assert list(KernelBench(pool, float, factory=OracleRunner, timer=StubTimer()).run(cells, 0.0)) == []
    rows = list(KernelBench(pool, float, factory=Lost, timer=StubTimer()).run(cells))
    assert len(rows) == 1
    assert rows[0][0]["fault"] == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_formats_that_the_runner_refuses_are_left_out() -> None:
    def factory(config):
        if config.kv_format == "e2m3":
            raise ConfigurationError("KV format e2m3: not yet")
        return OracleRunner(config)

    cells = parse_cells("9x3x64", "1", "16", "quick")
    kept, notes = kernel_decode.accepted_cells(cells, factory, CPU)
    assert kept == [cell for cell in cells if cell.kv_format == "fp8"]
    assert notes == ["no e2m3: KV format e2m3: not yet"]


def test_peers_get_their_arguments(pool: torch.Tensor, monkeypatch) -> None:
    """The call of each peer, against stand-ins; whether the kernels like it, only a GPU tells."""
    calls: dict[str, dict] = {}

    def record(name: str):
        return lambda *arguments, **options: calls.__setitem__(name, options | {"arguments": arguments})

    class Wrapper:
        def __init__(self, *arguments, **options) -> None:
            record("wrapper")(*arguments, **options)

        plan = staticmethod(record("plan"))
        run = staticmethod(record("run"))

    modules = {
        "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": record("triton")},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": types.SimpleNamespace(FP8_PER_TENSOR=1)},
        "vllm.vllm_flash_attn": {
            "flash_attn_varlen_func": record("fa3"),
            "get_scheduler_metadata": record("schedule"),
        },
        "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": Wrapper},
        "flashinfer.decode": {"xqa_batch_decode_with_kv_cache": record("xqa")},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernel_peers, "WORKSPACE_BYTES", 64)
    work = Workload(Cell(SMALL, RAGGED, 3, 16, "HND"), pool)
    factors = {}
    for name, (builder, _) in kernel_peers.BUILDERS.items():
        launch = builder(work)
        launch.run(1)
        factors[name] = launch.factor
    kernel_peers._workspace.cache_clear()
    assert factors == {"TRITON_ATTN": 1.0, "FA3": 1.0, "FA3, own splits": 1.0, "FlashInfer": 1.3, "XQA": 1.0}
    assert calls["triton"]["k"].shape == calls["fa3"]["v"].shape == (work.kv.k.shape[0], 16, 2, 64)
    assert calls["triton"]["k"].dtype == torch.float8_e4m3fn
    assert calls["triton"]["seq_threshold_3D"] == 64
    assert calls["triton"]["block_table"] is work.tables[1]
    assert calls["fa3"]["num_splits"] == 0
    assert calls["fa3"]["q_descale"].tolist() == [[2.0, 2.0]] * 3
    starts, pages, last, *_ = calls["plan"]["arguments"]
    assert (starts.tolist(), last.tolist()) == ([0, 5, 6, 9], [6, 5, 1])
    assert pages is work.pages[0]
    assert calls["run"]["arguments"][1][0].shape == (work.kv.k.shape[0], 2, 16, 64)
    assert calls["xqa"]["mask"].tolist() == [[[1, 0], [3, 0], [7, 0]]] * 3
    assert calls["xqa"]["out"].shape == (3, 3, 6, 64)
    assert calls["xqa"]["bmm1_scale"] == pytest.approx(0.7 / 8)


def test_peers_that_can_not_be_imported_are_named(monkeypatch) -> None:
    for _, module in kernel_peers.BUILDERS.values():
        monkeypatch.setitem(sys.modules, module, None if module.startswith("flashinfer") else types.ModuleType(module))
    found, missing = kernel_peers.importable()
    assert list(found) == ["TRITON_ATTN", "FA3", "FA3, own splits"]
    assert list(missing) == ["FlashInfer", "XQA"]
    assert missing["XQA"].startswith("ModuleNotFoundError: ")


def test_driver_version_without_its_tool(monkeypatch) -> None:
    monkeypatch.setattr(graph_timing.shutil, "which", lambda name: None)
    assert graph_timing.driver_version() == "unknown"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--shapes", "32x7x128"], "--shapes 32x7x128: accepted: HEADSxKV_HEADSxHEAD_SIZE as 32x8x128, whole heads a "
         "KV head, head sizes 64, 128, 256"),
        (["--shapes", "32x8"], "--shapes 32x8: accepted: HEADSxKV_HEADSxHEAD_SIZE as 32x8x128, whole heads a KV head, "
         "head sizes 64, 128, 256"),
        (["--shapes", "128x128x256"], "128x128x256 1x32768 q_len 1 pages of 16 NHD fp8: 2147483648 bytes; accepted: "
         "1073741824, half of the pool"),
        (["--q-len", "1,0"], "--q-len 1,0: accepted: 1 to 32"),
        (["--q-len", ""], "--q-len : accepted: 1 to 32"),
        (["--page", "16,48"], "--page 16,48: accepted: 16, 32, 64, 128"),
        (["--layout", "nhd"], "--layout nhd: accepted: NHD, HND"),
        (["--kv", "fp4"], "--kv fp4: accepted: fp8, e2m3"),
        (["--cells", "some"], "--cells some: accepted: all, quick, skewed"),
        (["--peers", "all"], "--peers all: accepted: auto, none"),
        (["--time-budget", "0"], "--time-budget 0: accepted: seconds above 0"),
        (["--out", "/nowhere/x.json"], "--out /nowhere/x.json: accepted: a file in a folder that exists"),
        ([], f"device 'cuda': PyTorch {torch.__version__} finds none; accepted: an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_what_can_not_be_used_costs_one_line(monkeypatch, capsys, words: list[str], line: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "bench", "kernel", *words) == 2
    assert capsys.readouterr() == ("", f"mjolnir: {line}\n")


def test_command(monkeypatch, capsys, tmp_path, pool: torch.Tensor) -> None:
    """The whole command, with a CPU for a GPU."""
    monkeypatch.setattr(kernel_decode, "usable_device", lambda name: CPU)
    monkeypatch.setattr(kernel_decode, "make_pool", lambda device: pool)
    monkeypatch.setattr(kernel_decode, "ReadCeiling", lambda pool: types.SimpleNamespace(us=lambda size: size / 1e4))
    monkeypatch.setattr(kernel_decode, "t5_runner", OracleRunner)
    monkeypatch.setattr(kernel_decode, "compile_ahead", list)
    monkeypatch.setattr(kernel_decode, "time_launches", StubTimer())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setitem(kernel_cells.BATCHES, "quick", (RAGGED,))
    out = tmp_path / "kernel.json"
    words = ["--shapes", "6x2x64", "--page", "16", "--q-len", "1,2", "--cells", "quick", "--peers", "none"]
    assert run(monkeypatch, "bench", "kernel", *words, "--out", str(out)) == 0
    document = json.loads(out.read_text())
    assert document["cells"] == {"measured": 4, "of": 4}
    assert document["command"].startswith("mjolnir bench kernel --shapes 6x2x64 --page 16 --q-len 1,2 ")
    assert [(row["q_len"], row["kv"]) for row in document["rows"]] == [(1, "fp8"), (1, "e2m3"), (2, "fp8"), (2, "e2m3")]
    assert document["rows"][1]["ratio"] == 1.0
    printed = capsys.readouterr()
    assert printed.out.count("6x2x64") == 4
    assert "q_len 2: T5 1.00 times as fast over e2m3 as over fp8" in printed.out
    assert printed.err.splitlines()[3] == "4 of 4: 6x2x64 ragged q_len 2 pages of 16 NHD e2m3: us: T5 10.0"

    class Wrong(OracleRunner):
        def run(self, plan, query, out, *rest, **options) -> None:
            out.zero_()

    monkeypatch.setattr(kernel_decode, "t5_runner", Wrong)
    assert run(monkeypatch, "bench", "kernel", *words, "--kv", "fp8") == 1
    assert "T5 relative error 1.0e+00; accepted: 1e-02" in capsys.readouterr().err
