"""The counters of this process: made on first use, one file, the last builder's word on a group."""

import subprocess
import sys

import pytest
from torch import distributed

from mjolnir import names, telemetry
from mjolnir.counters import GroupInfo, read
from mjolnir.names import StepKind

pytestmark = pytest.mark.usefixtures("stats_dir")


def group(label: str, reason: str = "") -> GroupInfo:
    return GroupInfo(label, "fp8", 64, 16, "TORCH_REF", reason)


def test_file_is_made_on_first_use_and_only_once(stats_dir):
    assert not stats_dir.exists()
    first = telemetry.process_counters()
    assert telemetry.process_counters() is first
    assert list(stats_dir.iterdir()) == [first.path]
    first.t5_step(StepKind.DECODE, 1)
    assert read(first.path).counters["t5:decode"] == 1


@pytest.mark.parametrize("value", [None, "", "  "])
def test_default_directory(monkeypatch, tmp_path, value):
    monkeypatch.setattr(names, "DEFAULT_STATS_DIR", str(tmp_path / "default"))
    if value is None:
        monkeypatch.delenv("MJOLNIR_STATS_DIR")
    else:
        monkeypatch.setenv("MJOLNIR_STATS_DIR", value)
    assert telemetry.process_counters().path.parent == tmp_path / "default"


def test_directory_that_can_not_be_written_is_one_warning(monkeypatch, tmp_path, backend_log):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MJOLNIR_STATS_DIR", f"{tmp_path}/file/stats")
    counters = telemetry.process_counters()
    telemetry.process_counters()
    assert counters.path is None
    assert [(record.levelname, record.getMessage()) for record in backend_log.records] == [
        (
            "WARNING",
            f"Mjolnir: steps are counted but can't be read from outside: Not a directory: {tmp_path}/file/stats",
        )
    ]


def test_rank_outside_of_a_worker_is_zero():
    assert read(telemetry.process_counters().path).rank == 0


def test_rank_of_a_worker(monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 5)
    assert read(telemetry.process_counters().path).rank == 5


def test_groups_are_shown_in_order_and_the_last_word_counts():
    """vLLM makes every builder twice, the first time to measure memory."""
    telemetry.publish_group(group("layers.1"))
    telemetry.publish_group(group("layers.0"))
    telemetry.publish_group(group("layers.1", reason="head_size 96"))
    path = telemetry.process_counters().path
    assert read(path).groups == (group("layers.0"), group("layers.1", reason="head_size 96"))


FORK = """
import os
import sys
from types import SimpleNamespace
from mjolnir import telemetry
from mjolnir.counters import GroupInfo
from mjolnir.names import StepKind

telemetry._rank = lambda: 0
telemetry.publish_group(GroupInfo("parents", "fp8", 64, 16, "TORCH_REF"))
telemetry.process_counters().t5_step(StepKind.DECODE, 1)
made = {"compiled": 5, "loaded": 0}
sys.modules["mjolnir.kernels.compiler"] = SimpleNamespace(CACHE_STATS=made)
telemetry.count_kernels()
child = os.fork()
if not child:
    made["compiled"] += 2
    telemetry.count_kernels()
    telemetry.process_counters().t5_step(StepKind.VERIFY, 1)
    telemetry.publish_group(GroupInfo("childs", "fp8", 64, 16, "TORCH_REF"))
    os._exit(0)
os.waitpid(child, 0)
telemetry.process_counters().t5_step(StepKind.DECODE, 1)
print(os.getpid(), child)
"""


def test_forked_child_counts_in_a_file_of_its_own(stats_dir):
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    parent, child = (read(path) for path in sorted(stats_dir.iterdir(), key=lambda path: path.stat().st_mtime_ns))
    if parent.counters["t5:verify"]:
        parent, child = child, parent
    assert result.stdout.split() == [str(parent.pid), str(child.pid)]
    assert (parent.counters["t5:decode"], parent.counters["t5:verify"]) == (2, 0)
    assert (child.counters["t5:decode"], child.counters["t5:verify"]) == (0, 1)
    assert (parent.counters["kernels:compiled"], child.counters["kernels:compiled"]) == (5, 2)
    assert [info.group for info in parent.groups] == ["parents"]
    assert [info.group for info in child.groups] == ["childs"]


def test_counting_needs_no_vllm():
    """The supervisor reads these files and has none."""
    code = "import sys, mjolnir.counters, mjolnir.telemetry; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
