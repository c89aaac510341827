"""One engine in a process of its own, which does what lines of JSON on its standard input say.

Each answer is a line of JSON on what was standard output when it began; everything that vLLM prints goes to standard
error. Functions that run inside vLLM's worker take the worker as their first argument.
"""

import hashlib
import importlib
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

TOP = 5
FILL_CHUNK = 1 << 30  # bytes of the cache that are filled at once
NO_NAN = 0xBF  # bits of an e4m3 byte that keep it below 2
METRICS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preempted": "vllm:num_preemptions",
}
PEAKED = 3.0  # deviation of the attention scores: few keys decide, so a wrong one shows


class Watch:
    """What happened in the worker since it began to be watched."""

    def __init__(self) -> None:
        self.replays = 0
        self.syncs: list[str] = []
        self.late_kernels: list[str] = []
        self.timing = False
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []


_watch = Watch()


def watch(worker: Any) -> None:
    """Begin to count graph replays, synchronisations and late compilations in the worker."""
    replay = torch.cuda.CUDAGraph.replay

    def counting(graph: Any) -> None:
        _watch.replays += 1
        if not _watch.timing:
            replay(graph)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay(graph)
        end.record()
        _watch.events.append((begin, end))

    torch.cuda.CUDAGraph.replay = counting
    show = warnings.showwarning

    def showing(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "called a synchronizing" in str(message) or "sync detected" in str(message):
            _watch.syncs.append(f"{filename}:{lineno}: {str(message)[:120]}")
        show(message, category, filename, lineno, *rest)

    warnings.showwarning = showing  # type: ignore[assignment]
    try:
        from vllm.utils import jit_monitor  # noqa: PLC0415
    except ImportError:
        return
    report = jit_monitor._handle_jit_event

    def reporting(**event: Any) -> None:
        _watch.late_kernels.append(f"{event.get('backend')} {event.get('fn_name')}")
        report(**event)

    jit_monitor._handle_jit_event = reporting


def randomise(model: Any) -> None:
    """Give every weight a random value that depends on its name alone, so that attention decides what is said."""
    heads = {}
    for module in model.modules():
        if hasattr(module, "qkv_proj") and hasattr(module, "q_size"):
            heads[id(module.qkv_proj.weight)] = module
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(PEAKED if "q_norm" in name else 1.0)
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        generator = torch.Generator(weight.device).manual_seed(seed)
        deviation = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        weight.data.normal_(0.0, deviation * (2 if "lm_head" in name else 1), generator=generator)
        attention = heads.get(id(weight))
        if attention is not None and not hasattr(attention, "q_norm"):
            weight.data[: attention.q_size] *= PEAKED


def use_random_weights() -> None:
    """Have vLLM's loader of dummy weights, which are near 0, give those of `randomise`."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415

    load = DummyModelLoader.load_weights

    def load_weights(loader: Any, model: Any, model_config: Any) -> None:
        load(loader, model, model_config)
        randomise(model)

    DummyModelLoader.load_weights = load_weights


def leave_query_as_it_is() -> None:
    """Have TRITON_ATTN, which can do both, take Q as the model made it and not in e4m3."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl  # noqa: PLC0415

    construct = TritonAttentionImpl.__init__

    def constructed(impl: Any, *args: Any, **kwargs: Any) -> None:
        construct(impl, *args, **kwargs)
        impl.supports_quant_query_input = False

    TritonAttentionImpl.__init__ = constructed


def miscompile() -> None:
    """Have T5's kernels give a wrong answer: V counts twice."""
    from mjolnir.kernels.stream_runner import StreamRunner  # noqa: PLC0415

    run = StreamRunner.run

    def wrong(runner: Any, plan: Any, query: Any, out: Any, kv: Any, k_scale: Any, v_scale: Any, *rest: Any) -> None:
        run(runner, plan, query, out, kv, k_scale, 2 * v_scale, *rest)

    StreamRunner.run = wrong  # type: ignore[method-assign, assignment]


def fill_cache(worker: Any) -> int:
    """Fill the KV cache with random bytes, none of them NaN; returns how many."""
    packed = worker.model_runner.vllm_config.cache_config.cache_dtype == "fp6_e2m3"
    filled: set[int] = set()
    for cache in _flat(worker.model_runner.kv_caches):
        storage = cache.untyped_storage()
        if storage.data_ptr() in filled or not storage.nbytes():
            continue
        filled.add(storage.data_ptr())
        whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        for part in whole.split(FILL_CHUNK):
            part.random_(0, 256)
            if not packed:
                part.bitwise_and_(NO_NAN)
    return len(filled)


def _flat(caches: Any) -> list[torch.Tensor]:
    return [caches] if isinstance(caches, torch.Tensor) else [each for part in caches for each in _flat(part)]


def begin_timing(_worker: Any) -> None:
    """Begin to time graph replays on the GPU."""
    _watch.events.clear()
    _watch.timing = True


def end_timing(_worker: Any) -> list[float]:
    """Times of the graph replays since `begin_timing`, in ms; the host's time is not in them."""
    _watch.timing = False
    if _watch.events:
        torch.cuda.synchronize()
    return [round(begin.elapsed_time(end), 4) for begin, end in _watch.events]


def counts(worker: Any) -> dict[str, Any]:
    """Step counters of the worker's process, kernels compiled so far, and what the watch saw."""
    from mjolnir import telemetry  # noqa: PLC0415

    snapshot = telemetry.process_counters().snapshot()
    compiler = sys.modules.get("mjolnir.kernels.compiler")
    return {
        "steps": {name: number for name, number in snapshot.counters.items() if number},
        "kernels": dict(compiler.CACHE_STATS) if compiler else {},
        "replays": _watch.replays,
        "syncs": list(_watch.syncs),
        "late_kernels": list(_watch.late_kernels),
    }


def facts(worker: Any) -> dict[str, Any]:
    """What the engine is made of."""
    from mjolnir import telemetry  # noqa: PLC0415

    runner = worker.model_runner
    config = runner.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    impls = sorted({_impl(layer) for layer in layers if hasattr(layer, "impl")})
    manager = getattr(runner, "cudagraph_manager", None)
    return {
        "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "impls": impls,
        "graph_mode": str(config.compilation_config.cudagraph_mode),
        "full_graphs": sorted({d.num_tokens for d in manager.graphs}) if manager is not None else [],
        "layout": config.cache_config.kv_cache_layout,
        "block_size": config.cache_config.block_size,
        "groups": [vars(group) for group in telemetry.process_counters().snapshot().groups],
        "memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


def _impl(layer: Any) -> str:
    bases = [base.__name__ for base in type(layer.impl).__mro__ if base.__module__.startswith(("vllm", "mjolnir"))]
    return " < ".join(bases[:3])


class Service:
    """The engine, and what it can be asked."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM  # noqa: PLC0415

        began = time.perf_counter()
        if arguments.pop("random_weights", False):
            use_random_weights()
        if arguments.pop("query_as_it_is", False):
            leave_query_as_it_is()
        if arguments.pop("miscompiled", False):
            miscompile()
        self.llm = LLM(**arguments)
        self.start_seconds = time.perf_counter() - began
        self._serial = 0

    def prepare(self, cache: bool) -> dict[str, Any]:
        """Begin to watch, and fill the cache with random values where asked to."""
        if cache:
            self._ask(fill_cache)
        self._ask(watch)
        return {"start_seconds": round(self.start_seconds, 1), **self._ask(facts)}

    def counts(self) -> dict[str, Any]:
        """See `counts`."""
        result: dict[str, Any] = self._ask(counts)
        return result

    def generate(self, prompts: list[list[int]], max_tokens: int, logprobs: bool = True) -> dict[str, Any]:
        """Greedy answers: token and log-probabilities of the best few, a step."""
        from vllm import SamplingParams  # noqa: PLC0415

        metrics = self._metrics()
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=TOP if logprobs else None,
            ignore_eos=True,
            detokenize=False,
        )
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        result = {"seconds": round(seconds, 3), "answers": [_answer(output.outputs[0]) for output in outputs]}
        return result | {
            name: after - metrics[name] for name, after in self._metrics().items() if after - metrics[name]
        }

    def _metrics(self) -> dict[str, float]:
        """Tokens drafted and accepted, and requests preempted, so far."""
        if not self.llm.llm_engine.log_stats:
            return {}
        found = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return {name: found.get(metric, 0) for name, metric in METRICS.items()}

    def decode(self, streams: int, context: int, vocab: int, warm: int, steps: int) -> dict[str, Any]:
        """Times of decode steps of ``streams`` requests with ``context`` tokens, in ms: by the clock, on the GPU."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=warm + steps + 8, ignore_eos=True, detokenize=False)
        params.output_kind = RequestOutputKind.DELTA
        names = []
        text = [2 + 7 * position % (vocab - 2) for position in range(context - 1)]
        for stream in range(streams):
            self._serial += 1
            names.append(f"bench-{self._serial}")
            tokens = [stream + 2, *text]
            engine.add_request(names[-1], {"prompt_token_ids": tokens}, params)
        times: list[float] = []
        seen = 0
        self._ask(begin_timing)
        while seen < warm + steps:
            outputs = engine.step()
            if len(outputs) < streams:  # not all of them decode yet
                continue
            seen += 1
            times.append(time.perf_counter())
        replays = self._ask(end_timing)[-steps:]
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        between = [1e3 * (after - before) for before, after in zip(times[warm - 1 :], times[warm:], strict=False)]
        return {"step_ms": [round(ms, 4) for ms in between], "gpu_ms": replays}

    def serve(self, requests: list[tuple[float, int, int]], vocab: int) -> dict[str, Any]:
        """Serve requests as they arrive: (seconds after the beginning, tokens of the prompt, tokens of the answer).

        Returns:
            ``requests``: (arrival, first token, last token, tokens) each, in seconds; ``gaps_ms``: times between the
            tokens of one request; ``seconds`` until all were answered.
        """
        engine = self.llm.llm_engine
        waiting = sorted(requests)
        tokens: dict[str, list[float]] = {}
        arrived: dict[str, float] = {}
        began = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while waiting and waiting[0][0] <= now:
                at, prompt, answer = waiting.pop(0)
                name = self._add(prompt, answer, vocab)
                arrived[name], tokens[name] = at, []
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0][0] - now))
                continue
            outputs = engine.step()
            ended = time.perf_counter() - began
            for output in outputs:
                tokens[output.request_id] += [ended] * len(output.outputs[0].token_ids)
        gaps = [1e3 * (after - one) for times in tokens.values() for one, after in itertools.pairwise(times)]
        return {
            "requests": [[arrived[name], times[0], times[-1], len(times)] for name, times in tokens.items()],
            "gaps_ms": [round(gap, 3) for gap in gaps],
            "seconds": time.perf_counter() - began,
        }

    def _add(self, prompt: int, answer: int, vocab: int) -> str:
        """Hand a request in, with a prompt that no other begins with."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        self._serial += 1
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        params.output_kind = RequestOutputKind.DELTA
        text = [2 + (self._serial + 7 * position) % (vocab - 2) for position in range(prompt)]
        self.llm.llm_engine.add_request(f"bench-{self._serial}", {"prompt_token_ids": text}, params)
        return f"bench-{self._serial}"

    def _ask(self, function: Callable[..., Any]) -> Any:
        return self.llm.collective_rpc(function)[0]


def _answer(output: Any) -> list[Any]:
    steps = output.logprobs or [{} for _ in output.token_ids]
    return [
        [token, {str(key): round(value.logprob, 5) for key, value in top.items()}]
        for token, top in zip(output.token_ids, steps, strict=True)
    ]


def _root(error: BaseException) -> str:
    """The first exception of a chain, and where it was raised."""
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames[-4:]))
    return f"{type(error).__name__}: {str(error)[:600]} ({where})"


def main() -> None:
    """Start the engine of the first line, then obey the following ones until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    service: Service | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if service is None:
                service = Service(request)
                answer({"ok": True})
                continue
            answer({"ok": getattr(service, request.pop("do"))(**request)})
        except BaseException as error:
            traceback.print_exc()
            answer({"error": _root(error)})
            if service is None:
                raise SystemExit(1) from None


if __name__ == "__main__":
    # By its name, under which vLLM's workers find the functions above.
    importlib.import_module("mjolnir.bench.gpu.child").main()
