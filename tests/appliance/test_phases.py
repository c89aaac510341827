import pytest

from appliance.phases import Phase, Progress, ProgressTracker, parse

CORE = "(EngineCore pid=6166) INFO 12-01 04:06:48 "
WORKER = "(Worker pid=6196) INFO 12-01 04:06:56 "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(APIServer pid=1) INFO 12-01 04:06:38 [model.py:733] Resolved architecture: X", (Phase.CONFIGURE, None)),
        (CORE + "[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: x", (Phase.CONFIGURE, None)),
        (WORKER + "[cpu_model_runner.py:68] Starting to load model /models/x...", (Phase.LOAD, None)),
        ("Loading safetensors checkpoint shards:   0% Completed | 0/9 [00:00<?, ?it/s]", (Phase.LOAD, 0)),
        ("Loading safetensors checkpoint shards:  44% Completed | 4/9 [00:02<00:03]", (Phase.LOAD, 44)),
        ("Loading pt checkpoint shards: 100% Completed | 1/1 [00:00<00:00]", (Phase.LOAD, 100)),
        (WORKER + "[default_loader.py:501] Loading weights took 0.39 seconds", (Phase.LOAD, None)),
        (WORKER + "[gpu_model_runner.py:1] Model loading took 14.2 GiB and 9 s", (Phase.LOAD, None)),
        (WORKER + "[backends.py:1] Dynamo bytecode transform time: 4.5 s", (Phase.COMPILE, None)),
        (WORKER + "[backends.py:1] Compiling a graph for compile range (1, 2048) takes 9 s", (Phase.COMPILE, None)),
        (WORKER + "[backends.py:1] Directly load the compiled graph(s) for range", (Phase.COMPILE, None)),
        (CORE + "[utils.py:347] Using LBHNC KV cache layout.", (Phase.KV_CACHE, None)),
        (CORE + "[kv_cache_utils.py:2327] CPU KV cache size: 93,184 tokens, Maximum", (Phase.KV_CACHE, None)),
        (CORE + "[kv_cache_utils.py:2327] GPU KV cache size: 93,184 tokens, Maximum", (Phase.KV_CACHE, None)),
        ("Capturing CUDA graphs (decode, FULL):  31%|###  | 11/35 [00:01<00:02]", (Phase.CAPTURE, 31)),
        (WORKER + "[gpu_model_runner.py:1] Graph capturing finished in 5 secs", (Phase.CAPTURE, None)),
        (CORE + "[core.py:9] init engine (profile, create kv cache, warmup model) took 4 s", (Phase.WARM_UP, None)),
        ("(APIServer pid=1) INFO [entry.py:9] Starting vLLM server on unix:/x", (Phase.SERVER, None)),
        ("INFO:     Application startup complete.", (Phase.SERVER, None)),
        ("(APIServer pid=1) INFO 12-01 04:06:38 [model.py:2152] Using max model len 2048", None),
        ("", None),
    ],
)
def test_lines_of_vllm(line, expected):
    assert parse(line) == (None if expected is None else Progress(*expected))


def test_a_stage_is_never_left_for_an_earlier_one():
    tracker = ProgressTracker()
    tracker.feed("Loading safetensors checkpoint shards:  90% Completed | 9/10")
    assert tracker.feed("(Worker pid=2) Resolved architecture: X")  # says something new, all the same
    assert tracker.progress == Progress(Phase.LOAD, 90)
    tracker.feed("Loading safetensors checkpoint shards:  20% Completed | 2/10")  # another worker
    assert tracker.progress == Progress(Phase.LOAD, 20)
    tracker.feed("(Worker pid=2) Loading weights took 3 seconds")
    assert tracker.progress == Progress(Phase.LOAD, 20)
    tracker.feed("Using NHD KV cache layout")
    assert tracker.progress == Progress(Phase.KV_CACHE)


def test_a_line_that_only_repeats_itself_is_no_movement():
    tracker = ProgressTracker()
    waiting = "INFO 12-01 04:{minute}:54 [shm.py:871] No block found in 60 seconds"
    moves = [tracker.feed(waiting.format(minute=minute)) for minute in range(22, 26)]
    assert moves == [True, False, False, False]
    percents = [tracker.feed(f"Capturing CUDA graphs: {percent}%| x") for percent in (10, 10, 11)]
    assert percents == [True, True, True]  # the second is its first repetition as a line
    assert not tracker.feed("Capturing CUDA graphs: 11%| x")
