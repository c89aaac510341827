"""The driver of scripts/gpu-engine without a GPU: its engine processes, figures and tables."""

import json
import sys

import pytest

from mjolnir import scales
from mjolnir.bench.gpu import report, run, tables
from mjolnir.bench.gpu.cases import SHAPES, Engine, agreement_engines, cells, prompts, speed_engines, write_model
from mjolnir.bench.gpu.cases import write_scales as write_scale_file
from mjolnir.bench.gpu.process import EngineFailedError, EngineProcess, root_cause

# An engine that answers with what it was asked.
ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print("noise of the engine", file=sys.stderr)
    print(json.dumps({"ok": request}), flush=True)
"""
DIES = """
import sys
sys.stdin.readline()
sys.stderr.write('Traceback (most recent call last):\\n  File "x.py", line 1\\nValueError: the first cause\\n')
sys.stderr.write("RuntimeError: Engine core initialization failed\\n")
sys.exit(1)
"""
REFUSES = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"error": "OutOfMemoryError: too large (child.py:1)"}), flush=True)
"""
HANGS = """
import sys, time
print("loading", file=sys.stderr, flush=True)
time.sleep(600)
"""


def engine(tmp_path, code, **environment) -> EngineProcess:
    return EngineProcess("one", {"model": "m"}, environment, tmp_path / "log", (sys.executable, "-c", code))


def test_engine_is_started_and_asked(tmp_path):
    process = engine(tmp_path, ECHO)
    try:
        process.wait_until_started(60)
        assert process.ask("decode", seconds=60, streams=4) == {"do": "decode", "streams": 4}
        assert "noise" in process.log.read_text()
    finally:
        process.stop()
    process.stop()  # which may have happened already


@pytest.mark.parametrize(
    ("code", "seconds", "cause"),
    [
        (DIES, 60, "one: died: ValueError: the first cause"),
        (REFUSES, 60, "one: OutOfMemoryError: too large (child.py:1)"),
        (HANGS, 1.5, "one: no answer within 2 s: loading"),
    ],
)
def test_engine_that_fails_says_the_first_cause(tmp_path, code, seconds, cause):
    process = engine(tmp_path, code)
    try:
        with pytest.raises(EngineFailedError) as error:
            process.wait_until_started(seconds)
        if code != HANGS:
            assert str(error.value) == cause
        assert str(error.value).startswith(cause.rpartition(":")[0])
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "it printed nothing"),
        ("a\nlast words\n\n", "last words"),
        ("(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory\nRuntimeError: x", "torch.OutOfMemoryError"),
        ("ERROR 12-03 06:00:00 [core.py:1] KeyError: 'a'", "KeyError: 'a'"),
        ("nothing but an Error in a sentence", "nothing but an Error in a sentence"),
    ],
)
def test_root_cause(tmp_path, text, cause):
    (tmp_path / "log").write_text(text)
    assert root_cause(tmp_path / "log").startswith(cause)


# What is run.


@pytest.mark.parametrize("name", SHAPES)
def test_model_and_scales_fit_each_other(tmp_path, name):
    shape = SHAPES[name]
    model = write_model(shape, 2, tmp_path)
    config = json.loads((model / "config.json").read_text())
    assert config["head_dim"] * config["num_attention_heads"] == shape.head_size * shape.heads
    file = scales.load(write_scale_file(shape, 2, model))
    scales.check_model("f", file, scales.shape_of_config(model.name, config))
    scales.check_layers("f", file, ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"])


def test_cache_of_a_speed_engine_holds_its_largest_cell():
    tokens = 544768
    for shape in ("qwen3-8b", "qwen3-27b"):
        for each in speed_engines(shape, 4, tokens, 131328, "cuda"):
            held = each.options["kv_cache_memory_bytes"] // SHAPES[shape].kv_bytes(4, each.kv)
            assert held == tokens
    largest = max(
        streams * (context + 256) for streams, context in cells([1, 4, 16, 64], [8192, 32768, 131072], tokens)
    )
    assert largest <= tokens
    assert cells([1, 4, 16, 64], [8192, 131072], tokens) == [
        *((many, 8192) for many in (1, 4, 16, 64)),
        *((many, 131072) for many in (1, 4)),
    ]


def test_engines_differ_in_the_backend_alone():
    ours, *stock = speed_engines("smollm2", 2, 4096, 2048, "cuda")
    assert ours.backend == "MJOLNIR"
    assert [each.backend for each in stock] == ["FLASH_ATTN", "TRITON_ATTN"]
    assert all(each.options == ours.options and each.kv == ours.kv for each in stock)
    first, second, *rest = agreement_engines("tiny", 2, 512, "cuda")
    names = [engine.name for engine in (first, second, *rest)]
    assert len(set(names)) == len(names)
    assert all(engine.against in names[: names.index(engine.name)] for engine in rest if engine.against)
    small = next(engine for engine in rest if engine.name == "T5 small cache")
    assert small.options["kv_cache_memory_bytes"] == 5120 * SHAPES["tiny"].kv_bytes(2, "fp8")
    assert first.environment["MJOLNIR_ATTN_DISABLE"] == "1"
    assert "MJOLNIR_ATTN_DISABLE" not in second.environment
    (split,) = [engine for engine in rest if engine.environment != second.environment and engine.name == "T5 split"]
    assert split.environment == second.environment | {"MJOLNIR_ATTN_SPLIT_MIXED": "1"}
    assert second.environment["MJOLNIR_ATTN_SPLIT_MIXED"] == "0"
    assert first.arguments("m", "cuda") == second.arguments("m", "cuda")


def test_options_of_an_engine_win_over_common_ones():
    arguments = Engine("e", "tiny", 2, options={"max_num_seqs": 3}).arguments("m", "cpu")
    assert arguments["max_num_seqs"] == 3
    assert arguments["enforce_eager"] is True


def test_prompts_are_the_same_everywhere():
    assert prompts(512, [3, 2]) == [[496, 275, 398], [452, 206]]
    assert prompts(512, [3, 2], seed=1) != prompts(512, [3, 2])
    assert {token for text in prompts(16, [400]) for token in text} == set(range(2, 16))


# Figures.


def counts(t5=0, replays=0, kernels=0, syncs=()):
    return {
        "steps": {"t5:decode": t5} if t5 else {},
        "kernels": {"compiled": kernels, "loaded": 0, "compile_seconds": 1.0},
        "replays": replays,
        "syncs": list(syncs),
        "late_kernels": [],
    }


def answer(*tokens, tops=None):
    return [[token, {str(token): -0.1, "9": -0.3} if tops is None else tops] for token in tokens]


def test_equal_answers():
    row = report.agreement_row([answer(1, 2)], [answer(1, 2)], counts(), counts(t5=5, replays=4, kernels=0))
    assert (row["same"], row["compared"], row["logprob_error_p99"], row["far"]) == (1, 2, 0.0, 0)
    assert (row["steps"], row["graph_replays"], row["kernels_compiled"], row["sync_count"]) == (
        {"t5:decode": 5},
        4,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("other", "far", "behind"),
    [
        (answer(1, 9), 0, 0.2),
        (answer(1, 7, tops={"7": -0.1, "1": -2.0}), 1, 0.0),
        (answer(1, 2, 3), 0, 0.0),
    ],
)
def test_first_difference_decides_how_far(other, far, behind):
    row = report.agreement_row([answer(1, 2, 3)[: len(other)]], [other], counts(), counts())
    assert (row["far"], row["behind_max"]) == (far, behind)


def test_answers_without_log_probabilities():
    plain = [[1, {}], [9, {}]]
    row = report.agreement_row([answer(1, 2)], [plain], counts(), counts())
    assert (row["same"], row["compared"], row["behind_max"], row["far"]) == (0, 0, 0.2, 0)


def test_ratios_are_over_the_best_stock_engine():
    def rounds(*clock, gpu=()):
        return [{"step_ms": steps, "gpu_ms": list(gpu)} for steps in clock]

    times = {
        "T5": rounds([1.0, 3.0], [2.0, 2.0], [9.0, 9.0], gpu=[0.5, 0.7]),
        "FLASH_ATTN": rounds(*[[4.0, 4.0]] * 3, gpu=[0.9]),
        "TRITON_ATTN": rounds(*[[3.0, 3.0]] * 3),
        "broken": [],
    }
    ours, flash, triton = report.speed_rows(times, 8)
    assert ours["output_tokens_per_s"] == 4000.0
    assert (ours["over_best_stock"], flash["over_best_stock"], triton["over_best_stock"]) == (1.5, 0.75, 1.0)
    assert (ours["itl_ms_p50"], ours["rounds_ms"]) == (2.5, [2.0, 2.0, 9.0])
    assert (ours["gpu_ms"], ours["gpu_over_best_stock"]) == (0.6, 1.5)
    assert (triton["gpu_ms"], triton["gpu_over_best_stock"]) == (None, None)


def good_row(**changes):
    row = {"kind": "agreement", "shape": "tiny", "engine": "T5", "case": "c", "far": 0, "kernels_compiled": 0}
    return row | {"sync_count": 0, "steps": {"t5:decode": 3}, "graph_replays": 3} | changes


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, False),
        ({"far": 1}, True),
        ({"kernels_compiled": 2}, True),
        ({"sync_count": 1}, True),
        ({"steps": {"fallback:ineligible": 3}}, True),
        ({"engine": "fallback", "steps": {}}, False),
    ],
)
def test_what_fails_the_run(changes, wrong):
    assert report.failed([good_row(**changes)], []) is wrong
    assert report.failed([good_row()], [{"where": "x", "cause": "y"}]) is True


def test_tables_show_everything(tmp_path):
    speed = {"kind": "speed", "shape": "tiny", "layers": 2, "streams": 4, "context": 1024}
    rows = [
        good_row(),
        speed
        | {"engine": "T5", "output_tokens_per_s": 20.0, "over_best_stock": 1.25}
        | {"gpu_ms": 0.5, "gpu_over_best_stock": 1.4},
        speed | {"engine": "FLASH_ATTN", "output_tokens_per_s": 16.0, "over_best_stock": 1.0},
    ]
    text = tables.render(rows, [{"where": "tiny: T5 fp6", "cause": "ValueError: no"}])
    assert "| 4x1024 | 20.0 (1.25) | 16.0 |" in text
    assert "| 4x1024 | 0.5 (1.4) |  |" in text
    assert "T5 level (ratio of 0.98 or more) or ahead in 1 of 1 cells." in text
    assert "| tiny | T5 |  | c |  |  |  |  | 0 | t5:decode 3 | 3 | 0 | 0 |  |" in text
    assert "FAILED tiny: T5 fp6: ValueError: no" in text
    report.save(tmp_path / "r.json", rows, [])
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == rows


def test_page_is_written_between_its_marks(tmp_path, monkeypatch):
    report.save(tmp_path / "r.json", [good_row()], [])
    page = tmp_path / "gpu.md"
    page.write_text(f"above\n{tables.BEGIN}\nolder\n{tables.END}\nbelow\n")
    monkeypatch.setattr(sys, "argv", ["tables", str(page), str(tmp_path / "r.json")])
    for _ in range(2):
        tables.main()
        text = page.read_text()
        assert text.startswith(f"above\n{tables.BEGIN}\n`scripts/gpu-engine`, ")
        assert text.endswith(f"{tables.END}\nbelow\n")
        assert "older" not in text
        assert text.count("t5:decode 3") == 1


# The command line.


@pytest.mark.parametrize("text", ["tiny", "tiny:2", "tiny:two:3", "unknown:2:3", "tiny:2:3:4"])
def test_argument_that_is_no_group(tmp_path, capsys, text):
    with pytest.raises(SystemExit) as exit_:
        run.main(["--out", str(tmp_path / "r.json"), "--agree", text])
    assert exit_.value.code == 2
    assert f"{text}: accepted: SHAPE:NUMBER:NUMBER, with a shape of qwen3-8b" in capsys.readouterr().err


def test_without_time_nothing_is_begun(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        run.main(["--out", str(tmp_path / "r.json"), "--seconds", "5", "--speed", "tiny:2:4096"])
    assert exit_.value.code == 1
    assert "FAILED tiny: no time left" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["failures"][0]["cause"] == "no time left"
