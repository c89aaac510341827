"""`mjolnir bench kernel`: what a row is compared with, the summary, the table and the result file."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from mjolnir.bench import kernel_decode, kernel_rows
from mjolnir.bench.kernel_cells import BALANCED, SHAPES, SKEWED, Cell, uniform
from mjolnir.bench.kernel_rows import Measurement, compared, geometric_mean, row, summary


def rows_of(cell: Cell, ceiling_us: float = 3.81, error: float = 0.002, **times: float) -> list[dict]:
    return [row(cell, name.replace("_", " "), Measurement(us, us, us, error), ceiling_us) for name, us in times.items()]


# Peers' times on an H200, ../shared/peers; T5's are made up.
LONE = rows_of(Cell(SHAPES[0], uniform(1, 4096)), T5=5.4, TRITON_ATTN=17.2, FA3=13.5, FlashInfer=17.2, XQA=10.8)
LONE_128 = rows_of(Cell(SHAPES[0], uniform(1, 4096), page_size=128), T5=6.0, FA3=13.3, XQA=10.9)
WIDE = rows_of(Cell(SHAPES[1], uniform(64, 2048)), 60.8, T5=70.0, XQA=66.3, FA3=167.8)
PACKED = rows_of(Cell(SHAPES[0], uniform(1, 4096), kv_format="e2m3"), 3.1, T5=4.5)


def test_t5_is_compared_with_the_best_peer_of_its_cell() -> None:
    first = compared(LONE)[0]
    assert (first["best_peer"], first["best_peer_us"], first["ratio"], first["of_ceiling"]) == ("XQA", 10.8, 2.0, 0.706)
    assert compared(LONE)[1:] == LONE[1:]
    assert compared(WIDE)[0]["ratio"] == 0.947
    failed = [*LONE[:1], row(Cell(SHAPES[0], uniform(1, 4096)), "XQA", Measurement(fault="no"), 3.81)]
    assert "ratio" not in compared(failed)[0]


def test_e2m3_is_compared_with_fp8() -> None:
    packed = compared([*LONE, *LONE_128, *PACKED])[-1]
    assert (packed["best_peer"], packed["best_peer_us"], packed["ratio"]) == ("T5 over fp8", 5.4, 1.2)
    assert "ratio" not in compared(PACKED)[0]


def test_skewed_is_compared_with_balanced() -> None:
    skewed, balanced = (rows_of(Cell(SHAPES[0], batch), T5=us) for batch, us in ((SKEWED, 100.0), (BALANCED, 90.0)))
    first, second = compared([*skewed, *balanced])
    assert first["of_balanced"] == 0.9
    assert "of_balanced" not in second


def test_summary() -> None:
    assert summary([*LONE, *LONE_128, *WIDE, *PACKED]) == [
        "q_len 1: T5 0.73 of the read ceiling (geometric mean of 3: 0.64 to 0.87)",
        "q_len 1: T5 1.51 times as fast as the best peer (geometric mean of 3: 0.95 to 2.00)",
        "q_len 1: T5 1.38 times as fast, each at its best page size and layout (geometric mean of 2: 0.95 to 2.00)",
        "q_len 1: T5 1.20 times as fast over e2m3 as over fp8 (geometric mean of 1: 1.20 to 1.20)",
    ]
    assert summary([]) == []


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10.0)


def test_table() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    wrong = row(Cell(SHAPES[3], uniform(4, 8192)), "T5", Measurement(relative_error=math.nan, fault="is wrong"), 4.7)
    console.print(kernel_rows.table([*LONE, wrong]))
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    assert " ".join(lines[1].split()) == "32x8x128 1x4096 1 16 NHD fp8 5.4 0.706 XQA 10.8 2.0 2.0e-03"
    assert " ".join(lines[2].split()) == "9x3x64 4x8192 1 16 NHD fp8 is wrong"


def test_result_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(kernel_decode, "driver_version", lambda: "580.159.04")
    path = tmp_path / "kernel.json"
    rows = [*LONE, *PACKED]
    kernel_decode.write(path, rows, command="mjolnir bench kernel", cells=9, missing={"FA3": "ImportError: no"})
    document = json.loads(path.read_text())
    assert document["machine"] == "NVIDIA H200, driver 580.159.04"
    assert document["versions"]["torch"] == torch.__version__
    assert document["cells"] == {"measured": 2, "of": 9}
    assert document["missing_peers"] == {"FA3": "ImportError: no"}
    assert document["rows"] == compared(rows)
    assert document["command"] == "mjolnir bench kernel"
    assert list(tmp_path.iterdir()) == [path]
