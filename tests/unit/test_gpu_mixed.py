"""The load of prompts and decodes of scripts/gpu-engine, without a GPU: requests, engines, turns, figures, tables."""

import itertools
import math
from types import SimpleNamespace

import pytest

from mjolnir.bench.gpu import mixed, report, run, tables
from mjolnir.bench.gpu.cases import SHAPES
from mjolnir.bench.gpu.child import Service
from mjolnir.bench.gpu.mixed import SERVING, SMALL, Arrival, Mixed, arrivals, mixed_engines
from mjolnir.bench.gpu.process import EngineFailedError

# Requests.


def test_arrivals_are_a_poisson_process_of_the_rate():
    found = arrivals(SERVING, 7, rate=20.0, seconds=100.0)
    assert found == arrivals(SERVING, 7, rate=20.0, seconds=100.0)
    assert found != arrivals(SERVING, 8, rate=20.0, seconds=100.0)
    gaps = [after.at - one.at for one, after in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    # Exponential: the deviation is the mean.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.15)
    assert 0 < found[0].at <= found[-1].at < 100.0
    assert {2048 <= each.prompt <= 16384 and 128 <= each.answer <= 256 for each in found} == {True}
    octaves = [sum(low <= each.prompt < 2 * low for each in found) / len(found) for low in (2048, 4096, 8192)]
    assert octaves == pytest.approx([1 / 3] * 3, abs=0.05)


def test_burst_comes_at_once():
    found = arrivals(SMALL, 0)
    assert [each.at for each in found] == [0.0] * SMALL.burst
    assert len({(each.prompt, each.answer) for each in found}) > 1


def test_engines_differ_in_the_setting_alone():
    for device in ("cuda", "cpu"):
        whole, split = mixed_engines("qwen3-8b", 8, 544768, device)
        assert whole.environment == {"MJOLNIR_ATTN_SPLIT_MIXED": "0"}
        assert split.environment == {"MJOLNIR_ATTN_SPLIT_MIXED": "1"}
        assert (split.options, split.backend, split.kv, split.layers) == (
            whole.options,
            whole.backend,
            whole.kv,
            whole.layers,
        )
    whole, _ = mixed_engines("qwen3-8b", 8, 544768, "cuda")
    assert whole.options["max_num_batched_tokens"] == 2048
    assert whole.options["max_model_len"] == 16384 + 256 + 64
    assert whole.options["kv_cache_memory_bytes"] == 544768 * SHAPES["qwen3-8b"].kv_bytes(8, "fp8")


# The engine's side.


class Engine:
    """Answers one token of each request a step, two of one that has drafts; a prompt takes a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.read: set[str] = set()
        self.steps: list[list[str]] = []
        self.prompts: list[list[int]] = []

    def add_request(self, name, prompt, params) -> None:
        self.left[name] = params.max_tokens
        self.prompts.append(prompt["prompt_token_ids"])

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self):
        outputs = []
        for name in list(self.left):
            if name not in self.read:
                self.read.add(name)
                continue
            tokens = min(2, self.left[name])
            self.left[name] -= tokens
            if not self.left[name]:
                del self.left[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[5] * tokens)]))
        self.steps.append([output.request_id for output in outputs])
        return outputs


def test_requests_are_served_as_they_arrive():
    engine = Engine()
    service = Service.__new__(Service)
    service.llm, service._serial = SimpleNamespace(llm_engine=engine), 0
    answer = service.serve([[0.02, 4, 3], [0.0, 6, 5]], vocab=32)
    assert [len(prompt) for prompt in engine.prompts] == [6, 4]
    assert engine.prompts[0][0] != engine.prompts[1][0]
    (early, late) = answer["requests"]
    assert (early[0], early[3]) == (0.0, 5)
    assert (late[0], late[3]) == (0.02, 3)
    assert late[1] >= 0.02
    assert all(0 < first <= last <= answer["seconds"] for _, first, last, _ in answer["requests"])
    assert len(answer["gaps_ms"]) == 4 + 2
    assert sum(answer["gaps_ms"]) / 1e3 == pytest.approx(early[2] - early[1] + late[2] - late[1], abs=0.01)


# The driver's side.


def served(rate: float, tokens: int = 10, gaps=(2.0, 4.0)) -> dict:
    return {
        "requests": [[0.0, 0.1, 1.0, tokens], [0.5, 0.7, 1.5, tokens]],
        "gaps_ms": list(gaps),
        "seconds": 2 / rate,
    }


class Process:
    """An engine that answers 4 requests a second, or fails at what it is told to."""

    def __init__(self, name: str, calls: list, fails: str = "") -> None:
        self.name, self.calls, self.fails = name, calls, fails
        self.steps: dict[str, int] = {}
        self.stopped = False

    def ask(self, do, **request):
        if do == self.fails:
            raise EngineFailedError(f"{self.name}: ValueError: no")
        if do == "counts":
            kernels = {"compiled": 0, "loaded": 0}
            return {"steps": dict(self.steps), "kernels": kernels, "replays": 0, "syncs": [], "late_kernels": []}
        self.calls.append((self.name, do, request.get("requests")))
        self.steps["t5:decode"] = self.steps.get("t5:decode", 0) + 3
        kind = "t5:split" if "split" in self.name else "fallback:mixed"
        self.steps[kind] = self.steps.get(kind, 0) + 2
        if do == "generate":
            return {"seconds": 1.0, "answers": [[[1, {"1": -0.1, "2": -3.0}]]]}
        return served(4.0)

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def group(tmp_path):
    made = Mixed(run.Run(tmp_path / "r.json", "cpu", 500, tmp_path), "tiny", 2, 4096, 0.75, 20.0)
    calls: list = []
    made.ready = {name: Process(name, calls) for name in made.wanted}
    made.calls = calls
    return made


def test_engines_take_turns_over_the_same_requests(group):
    group.measure()
    asked = [(name, requests) for name, do, requests in group.calls if do == "serve"]
    assert [name for name, _ in asked] == ["T5", "T5 split", "T5 split", "T5"] * 2
    assert [requests for _, requests in asked[::2]] == [requests for _, requests in asked[1::2]]
    burst, steady = asked[0][1], asked[4][1]
    assert {at for at, _, _ in burst} == {0.0}
    assert [Arrival(*each) for each in steady] == arrivals(SMALL, 100, 0.75 * 4.0, 20.0)
    assert asked[6][1] != steady
    rows = [row for row in group.run.rows if row["kind"] == "load"]
    assert [(row["engine"], row["load"], row.get("rate")) for row in rows] == [
        ("T5", "at once", None),
        ("T5 split", "at once", None),
        ("T5", "steady", 3.0),
        ("T5 split", "steady", 3.0),
    ]
    assert rows[1]["steps"] == {"t5:decode": 6, "t5:split": 4}
    assert not report.failed(group.run.rows, group.run.failures)


@pytest.mark.parametrize("fails", ["serve", "generate"])
def test_engine_that_fails_leaves_the_other_to_be_measured(group, fails):
    broken = group.ready["T5 split"]
    broken.fails = fails
    group.measure()
    assert broken.stopped
    assert list(group.ready) == ["T5"]
    loads = [(row["engine"], row["load"]) for row in group.run.rows if row["kind"] == "load"]
    assert loads == [("T5", "at once"), ("T5", "steady")]
    assert group.run.failures[0]["cause"] == "T5 split: ValueError: no"


def test_figures_of_a_load():
    row = report.load_row([served(4.0, tokens=10, gaps=[1.0] * 98 + [9.0]), served(2.0, tokens=30, gaps=[3.0])])
    assert row == {
        "requests": 4,
        "output_tokens_per_s": 50.0,
        "rounds_tokens_per_s": [40.0, 60.0],
        "itl_ms_p50": 1.0,
        "itl_ms_p99": 3.0,
        "ttft_ms_p50": 100.0,
        "ttft_ms_p99": 200.0,
        "in_flight": 2.67,
    }
    assert report.requests_per_second([served(4.0), served(2.0)]) == pytest.approx(4 / 1.5)
    assert report.load_row([served(4.0, gaps=[])])["itl_ms_p99"] is None


def load_row(engine="T5 split", **changes):
    row = {"kind": "load", "shape": "tiny", "layers": 2, "engine": engine, "load": "steady", "rate": 3.0}
    return row | report.load_row([served(4.0)]) | {"steps": {"t5:split": 5}, "kernels_compiled": 0} | changes


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (load_row(), False),
        (load_row("T5", steps={"fallback:mixed": 5}), False),
        (load_row(steps={"fallback:mixed": 5}), True),
        (load_row("T5"), True),
        (load_row(kernels_compiled=1), True),
    ],
)
def test_what_fails_the_run(row, wrong):
    assert report.failed([row], []) is wrong


def test_table_of_a_load():
    text = tables.render([load_row("T5", steps={"fallback:mixed": 7, "fallback_tokens": 90}), load_row()], [])
    assert (
        "| tiny | 2 | steady | 3.0 | T5 | 2 | 40.0 | 40.0 | 2.0 | 2.0 | 100.0 | 100.0 | 4.0 | fallback:mixed 7 |"
        in text
    )
    assert "| T5 split | 2 | 40.0 | 40.0 | 2.0 | 2.0 | 100.0 | 100.0 | 4.0 | t5:split 5 |" in text


def test_answers_are_compared_over_mixed_steps(group):
    group.measure()
    ours, split = [row for row in group.run.rows if row["kind"] == "agreement"]
    assert (ours["against"], split["against"], split["same"], split["far"]) == ("", "T5", 1, 0)
    assert mixed.mix_for("cuda") is SERVING
