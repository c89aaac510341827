"""Decode on a CPU: MJOLNIR over an fp8 cache beside vLLM's CPU_ATTN over a bf16 cache, in one run.

Both engines are loaded first and then take turns, so that whatever else the machine does hits both; each figure
is the median of the rounds. A decode step's time is the difference between a generation of many tokens and one of
a single token, over the number of steps between them: the prompt's cost cancels.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mjolnir.bench.results import write_result

BASELINE = ("CPU_ATTN", "auto")
OURS = ("MJOLNIR", "fp8")
CASES = ((1, 32), (1, 256), (1, 1024), (4, 256), (8, 256))  # (streams, tokens of context)
STEPS = 48
GOAL = 1.5


@dataclass
class Engine:
    """One engine in a child process, driven by a JSON line a measurement."""

    backend: str
    kv: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, model: str, backend: str, kv: str, eager: bool) -> "Engine":
        """Start loading an engine; `wait` tells when it is ready."""
        command = [sys.executable, "-m", __spec__.name, "--model", model, "--engine", backend, kv]
        command += ["--eager"] if eager else []
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return cls(backend, kv, process)

    def answer(self) -> Any:
        """The next JSON line of the child.

        Raises:
            RuntimeError: the child ended.
        """
        assert self.process.stdout is not None  # noqa: S101  (opened above)
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the engine with {self.backend} ended with exit code {self.process.wait()}")

    def step_ms(self, streams: int, context: int) -> float:
        """Milliseconds of one decode step."""
        assert self.process.stdin is not None  # noqa: S101  (opened above)
        self.process.stdin.write(json.dumps({"streams": streams, "context": context}) + "\n")
        self.process.stdin.flush()
        return float(self.answer()["step_ms"])

    def stop(self) -> None:
        """End the child by closing its input."""
        assert self.process.stdin is not None  # noqa: S101  (opened above)
        self.process.stdin.close()
        self.process.wait()


def serve_engine(model: str, backend: str, kv: str, eager: bool) -> None:
    """The child: load an engine, then measure as the lines on standard input ask."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415  (seconds; the parent does without)

    llm = LLM(
        model,
        attention_config={"backend": backend},
        kv_cache_dtype=kv,
        dtype="bfloat16",
        max_model_len=2048,
        enforce_eager=eager,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 29,
    )

    def seconds(streams: int, context: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [1000 + (stream * 7 + i) % 40000 for i in range(context)]} for stream in range(streams)
        ]
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(1, 16, 8)
    sys.stdout.write(json.dumps({"ready": backend}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        case = json.loads(line)
        one = seconds(case["streams"], case["context"], 1)
        many = seconds(case["streams"], case["context"], STEPS + 1)
        sys.stdout.write(json.dumps({"step_ms": (many - one) / STEPS * 1000}) + "\n")
        sys.stdout.flush()


def measure(model: str, rounds: int, eager: bool) -> list[dict[str, Any]]:
    """One row a backend and case: `tokens_per_s` and `step_ms` are medians, `ratio` is against the baseline."""
    engines = [Engine.start(model, backend, kv, eager) for backend, kv in (BASELINE, OURS)]
    try:
        for engine in engines:
            engine.answer()
        rows = []
        for streams, context in CASES:
            times: dict[str, list[float]] = {engine.backend: [] for engine in engines}
            for _ in range(rounds):
                for engine in engines:
                    times[engine.backend].append(engine.step_ms(streams, context))
            baseline = statistics.median(times[BASELINE[0]])
            for engine in engines:
                step = statistics.median(times[engine.backend])
                rows.append(
                    {
                        "model": Path(model).name,
                        "backend": engine.backend,
                        "kv": engine.kv,
                        "streams": streams,
                        "context": context,
                        "tokens_per_s": round(streams * 1000 / step, 1),
                        "step_ms": round(step, 2),
                        "ratio": round(step / baseline, 3),
                    }
                )
                sys.stderr.write(f"{rows[-1]}\n")
        return rows
    finally:
        for engine in engines:
            engine.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--rounds", type=int, default=5, help="times that each engine measures each case")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, in both engines")
    parser.add_argument("--out", type=Path, help="result file; without it the rows are only printed")
    parser.add_argument("--engine", nargs=2, metavar=("BACKEND", "KV"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        backend, kv = options.engine
        serve_engine(options.model, backend, kv, options.eager)
        return
    rows = measure(options.model, options.rounds, options.eager)
    if options.out:
        write_result(
            options.out,
            what="decode on a CPU, MJOLNIR with an fp8 cache beside CPU_ATTN with a bf16 cache; medians of "
            f"{options.rounds} alternating rounds; ratio = step time over CPU_ATTN's",
            command="scripts/bench cpu" + (" --eager" if options.eager else ""),
            rows=rows,
        )


if __name__ == "__main__":
    main()
