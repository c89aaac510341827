"""Launch configurations: the files' and the autotuner's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mjolnir.bench import autotune
from mjolnir.kernels import tuning
from mjolnir.kernels.tuning import StreamTuning, stream_tuning
from mjolnir.kernels.variants import shape_of
from mjolnir.runner import RunnerConfig

ARCHITECTURES = ["default", "sm_90", "sm_110"]
SHARED_BYTES, REGISTERS = 227 * 1024, 65536


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_files_have_a_configuration_for_every_class(arch: str) -> None:
    rows = json.loads((tuning.TUNED / f"{arch}.json").read_text())["rows"]
    classes = {(row["kv_format"], row["head_size"], row["query_rows"]) for row in rows}
    assert len(classes) == len(rows)
    kinds = {(kind.kv_format, kind.shape.head_size, kind.query_rows) for kind in autotune.CLASSES}
    assert kinds <= classes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_hopper_runs_the_wgmma_kernel(arch: str) -> None:
    rows = json.loads((tuning.TUNED / f"{arch}.json").read_text())["rows"]
    kernels = {row["tuning"]["kernel"] for row in rows}
    assert kernels == ({"stream", "wgmma"} if arch == "sm_90" else {"stream", "wide"})


def test_a_measured_configuration_is_the_best_of_those_that_were_tried() -> None:
    rows = json.loads((tuning.TUNED / "sm_90.json").read_text())["rows"]
    measured = [row for row in rows if "measured" in row]
    assert len(measured) == 6
    for row in measured:
        assert row["measured"]["fraction"] == max(other["fraction"] for other in row["others"])


def test_an_unknown_architecture_takes_the_default() -> None:
    assert stream_tuning("sm_89", 128, 32) == stream_tuning("default", 128, 32)


@pytest.mark.parametrize("kind", autotune.CLASSES, ids=str)
def test_candidates_fit_an_sm(kind: autotune.Class) -> None:
    """By registers, where they are capped, and by what the wgmma kernel keeps in shared memory."""
    for arch in ("sm_90", "sm_110"):
        candidates = list(autotune.candidates(kind, arch))
        assert candidates
        assert len(set(candidates)) == len(candidates)
        for each in candidates:
            assert each.kernel != "wgmma" or arch == "sm_90"
            cap = each.max_registers or 255
            assert each.max_registers is None or each.programs_per_sm * each.warps * 32 * cap <= REGISTERS
            if each.kernel == "wgmma":
                d = kind.shape.head_size
                kept = 2 * each.stages * each.tokens * d + 2 * each.rows * d + 2 * each.rows * each.tokens
                assert each.programs_per_sm * (kept + 1024) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("each", "tile"),
    [
        (StreamTuning(warps=4, row_groups=2, rows=16, tokens=16), 32),
        (StreamTuning(kernel="wide", rows=32), 64),
        (StreamTuning(kernel="wgmma", rows=32, tokens=128), 128),
    ],
)
def test_tokens_of_a_tile(each: StreamTuning, tile: int) -> None:
    config = RunnerConfig(64, 8, 128, 16, torch.bfloat16, 1, torch.device("cpu"), max_q_len=4)
    assert shape_of(config, 4, 132, tuning=each).tile == tile


def test_tuning_some_classes_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    def row(kv_format: str, head_size: int, query_rows: int, warps: int) -> dict[str, Any]:
        tuned = {"warps": warps}
        return {"kv_format": kv_format, "head_size": head_size, "query_rows": query_rows, "tuning": tuned}

    file = tmp_path / "sm_90.json"
    found = [row("fp8", 128, 8, 2)]
    assert autotune.updated(file, found) == found
    file.write_text(json.dumps({"rows": [row("fp8", 64, 8, 4), row("fp8", 128, 8, 4), row("e2m3", 128, 8, 4)]}))
    assert autotune.updated(file, found) == [row("fp8", 64, 8, 4), row("fp8", 128, 8, 2), row("e2m3", 128, 8, 4)]
