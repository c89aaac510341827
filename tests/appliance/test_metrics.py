"""Counters over the lives and deaths of real processes that write real files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.faults import Cause
from appliance.lifecycle import State
from appliance.metrics import Metrics
from appliance.phases import Phase
from appliance.tally import Tally, remove_leftovers
from mjolnir.names import FallbackReason, KernelSource, StepKind

WRITER = """
import sys
from mjolnir.counters import CounterFile, GroupInfo
from mjolnir.names import FallbackReason, KernelSource, StepKind
file = CounterFile(sys.argv[1], rank=int(sys.argv[2]))
file.set_groups([GroupInfo("g", "fp8", 64, 16, "TORCH_REF")])
for line in sys.stdin:
    for _ in range(int(line)):
        file.t5_step(StepKind.DECODE, 2)
        file.fallback_step(FallbackReason.PREFILL, 5)
        file.kernels(KernelSource.COMPILED)
    print(flush=True)
"""


class Writer:
    """A child process with a counters file of its own."""

    def __init__(self, directory: Path, rank: int = 0) -> None:
        command = [sys.executable, "-c", WRITER, str(directory), str(rank)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step(0)

    def step(self, number: int) -> None:
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def die(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def writer(tmp_path):
    writers = []

    def start(rank=0):
        writers.append(Writer(tmp_path, rank))
        return writers[-1]

    yield start
    for each in writers:
        each.die()


def figures(metrics: Metrics) -> tuple[float, ...]:
    """T5 steps, T5 tokens, prefill steps, fallback tokens, compiled kernels."""
    value = metrics.registry.get_sample_value
    return (
        value("mjolnir_t5_steps_total", {"kind": "decode"}),
        value("mjolnir_t5_tokens_total"),
        value("mjolnir_fallback_steps_total", {"reason": "prefill"}),
        value("mjolnir_fallback_tokens_total"),
        value("mjolnir_kernels_total", {"source": "compiled"}),
    )


def test_warm_up_is_not_counted_and_totals_survive_restarts(tmp_path, writer):
    metrics = Metrics(Tally(tmp_path))
    first = writer()
    first.step(10)  # warm-up
    assert figures(metrics) == (0, 0, 0, 0, 10)
    metrics.became_ready(1.0)
    first.step(3)
    assert figures(metrics) == (3, 6, 3, 15, 13)
    first.step(1)
    first.die()
    assert figures(metrics) == (4, 8, 4, 20, 14)
    assert list(tmp_path.iterdir()) == []  # folded in, and removed
    assert figures(metrics) == (4, 8, 4, 20, 14)  # once

    metrics.engine_gone()
    second = writer()
    second.step(20)
    assert figures(metrics) == (4, 8, 4, 20, 34)
    metrics.became_ready(1.0)
    second.step(2)
    assert figures(metrics) == (6, 12, 6, 30, 36)


def test_a_start_that_fails_adds_nothing_but_its_kernels(tmp_path, writer):
    metrics = Metrics(Tally(tmp_path))
    failed = writer()
    failed.step(5)
    failed.die()
    metrics.engine_gone()
    assert figures(metrics) == (0, 0, 0, 0, 5)


def test_counts_between_the_last_scrape_and_the_death_are_kept(tmp_path, writer):
    metrics = Metrics(Tally(tmp_path))
    engine = writer()
    metrics.became_ready(1.0)
    engine.step(9)  # never scraped while it lived
    engine.die()
    metrics.engine_gone()
    assert figures(metrics)[0] == 9


def test_a_worker_that_comes_after_ready_is_counted_whole(tmp_path, writer):
    metrics = Metrics(Tally(tmp_path))
    metrics.became_ready(1.0)
    late = writer()
    late.step(4)
    late.die()
    metrics.engine_gone()
    assert figures(metrics)[0] == 4


def test_only_rank_0_counts_steps_and_every_rank_its_kernels(tmp_path, writer):
    metrics = Metrics(Tally(tmp_path))
    ranks = [writer(0), writer(1)]
    metrics.became_ready(1.0)
    for rank in ranks:
        rank.step(2)
    assert figures(metrics) == (2, 4, 2, 10, 4)


def test_an_unreadable_file_is_counted_and_harms_nothing(tmp_path, writer):
    metrics = Metrics(Tally(tmp_path))
    engine = writer()
    metrics.became_ready(1.0)
    engine.step(1)
    (tmp_path / "0-cut.counters").write_bytes(b"MJOLNIR\n")
    foreign = (next(tmp_path.glob("[1-9]*.counters"))).read_bytes()
    (tmp_path / "0-foreign.counters").write_bytes(b"x" * len(foreign))
    (tmp_path / "0-folder.counters").mkdir()
    broken = bytearray(foreign)
    broken[1024:1028] = b"][ x"
    (tmp_path / "0-groups.counters").write_bytes(broken)
    before = metrics.registry.get_sample_value("appliance_scrape_errors_total", {"source": "counters"})
    assert figures(metrics)[0] == 1
    value = metrics.registry.get_sample_value("appliance_scrape_errors_total", {"source": "counters"})
    assert before == 0
    assert value >= 4


def test_every_label_value_is_there_from_the_start(tmp_path):
    page = Metrics(Tally(tmp_path)).page()
    families = {family.name: family for family in text_string_to_metric_families(page)}

    def values(name, label):
        return {s.labels[label]: s.value for s in families[name].samples if label in s.labels}

    assert values("mjolnir_t5_steps", "kind") == dict.fromkeys(StepKind, 0)
    assert values("mjolnir_fallback_steps", "reason") == dict.fromkeys(FallbackReason, 0)
    assert values("mjolnir_kernels", "source") == dict.fromkeys(KernelSource, 0)
    assert values("appliance_engine_restarts", "cause") == dict.fromkeys(Cause, 0)
    assert values("appliance_scrape_errors", "source") == {"counters": 0, "engine": 0}
    assert set(values("appliance_engine_state", "appliance_engine_state")) == set(State)
    assert set(values("appliance_engine_phase", "appliance_engine_phase")) == {"none", *Phase}
    assert len(families) == len(list(text_string_to_metric_families(page)))
    assert "_created" not in page


def test_groups_outlive_the_engine_that_told_them(tmp_path, writer):
    metrics = Metrics(Tally(tmp_path))
    engine = writer()
    labels = {"group": "g", "kv_format": "fp8", "head_size": "64", "page_size": "16", "fallback": "TORCH_REF"}
    metrics.page()
    engine.die()
    metrics.engine_gone()
    assert metrics.registry.get_sample_value("mjolnir_group_info", {**labels, "reason": ""}) == 1


def test_leftovers_of_dead_supervisors_are_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "1-1.counters").write_bytes(b"")
    (tmp_path / "notes").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([str(os.getpid()), "notes"])


async def test_the_page_of_a_running_appliance(appliance):
    async with appliance() as running:
        await running.states.reach(State.READY)
        await running.post("/v1/completions", {})
        async with running.http.get("/metrics") as response:
            assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            page = await response.text()
        families = [family.name for family in text_string_to_metric_families(page)]
        assert len(families) == len(set(families))
        assert "vllm:num_requests_running" in families
        assert not [name for name in families if name.startswith(("python_", "process_"))]
        samples = await running.samples()
        assert samples['mjolnir_t5_steps_total{kind="decode"}'] == 1
        assert samples['mjolnir_fallback_steps_total{reason="prefill"}'] == 1
        assert samples['mjolnir_kernels_total{source="compiled"}'] == 3
        assert samples['appliance_engine_state{appliance_engine_state="ready"}'] == 1
        assert samples["appliance_engine_start_seconds_count"] == 1
        assert samples['appliance_http_requests_total{code="200",route="/v1/completions"}'] == 1
        status = json.loads(await running.get("/status"))
        assert (status["state"], status["model"], status["url"]) == ("ready", "fake-model", running.url)
        assert (status["counters"]["t5:decode"], status["groups"][0]["kv_format"]) == (1, "fp8")
        assert any("init engine" in line for line in status["log_tail"])


async def test_an_engine_whose_metrics_are_no_metrics_costs_only_its_part(appliance):
    async with appliance("--metrics-page", "<html>oops</html>") as running:
        await running.states.reach(State.READY)
        await running.samples()
        samples = await running.samples()
        assert samples['appliance_scrape_errors_total{source="engine"}'] == 2
        assert "mjolnir_t5_tokens_total" in samples
        assert not [name for name in samples if name.startswith("vllm:")]
