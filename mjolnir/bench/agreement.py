"""Does MJOLNIR say the same as CPU_ATTN with a bf16 cache, and where it does not, was it a near tie?

Greedy decoding of 30 prompts, 64 tokens each. Two engines that differ in the cache's precision part ways wherever
the two best tokens are nearly even, and from there on say different things, so texts are not compared. Compared
are, up to and with the first difference, the log-probabilities: of the chosen token where both chose the same, and
at the first difference how far ahead the reference's choice was.

What a difference may be blamed on is measured beside it: what the cache format alone does to the margin between the two
best tokens, by the fallback without T5 and by vLLM's own CPU kernel over an fp8 cache (which needs AVX-512); and the
noise floor of bf16 arithmetic, by the reference itself with another batch size.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mjolnir.bench.prompts import PROMPTS
from mjolnir.bench.results import write_result

TOKENS = 64
TOP = 5


@dataclass(frozen=True)
class Case:
    """One way to run the prompts.

    Attributes:
        name: what it exercises.
        backend: attention backend.
        kv: KV cache dtype.
        batch: requests at a time.
        options: engine options.
        environment: variables of the engine's process.
        tokens: length of each answer.
    """

    name: str
    backend: str
    kv: str
    batch: int
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    tokens: int = TOKENS


# 16 pages of 128 tokens do not hold eight of these sequences: requests are preempted and recomputed.
TINY_CACHE = {"num_gpu_blocks_override": 16}
REFERENCE = Case("reference", "CPU_ATTN", "auto", 1, {"enable_prefix_caching": False})
NOISE = Case("reference, 8 at a time", "CPU_ATTN", "auto", 8, {"enable_prefix_caching": False})
STOCK_FP8 = Case("CPU_ATTN over fp8", "CPU_ATTN", "fp8", 1, {"enable_prefix_caching": False})
FALLBACK = Case("fallback alone", "MJOLNIR", "fp8", 1, {"enable_prefix_caching": False}, {"MJOLNIR_ATTN_DISABLE": "1"})
CASES = (
    Case("one at a time", "MJOLNIR", "fp8", 1, {"enable_prefix_caching": False}),
    Case("8 at a time", "MJOLNIR", "fp8", 8, {"enable_prefix_caching": False}),
    # As many programs as a Thor has: sequences are split, and their pieces merged.
    Case("split plan", "MJOLNIR", "fp8", 8, {"enable_prefix_caching": False}, {"MJOLNIR_ATTN_CTAS": "40"}),
    Case("prefix caching, each prompt twice", "MJOLNIR", "fp8", 8, {"enable_prefix_caching": True}),
    Case("chunked prefill, 64 tokens", "MJOLNIR", "fp8", 8, {"max_num_batched_tokens": 64, "max_num_seqs": 8}),
    Case("preemption, tiny cache", "MJOLNIR", "fp8", 8, {"enable_prefix_caching": False, **TINY_CACHE}),
)


@dataclass(frozen=True)
class Step:
    """One generated token: what was chosen, and the log-probabilities of the best few."""

    token: int
    logprobs: dict[int, float]

    @property
    def margin(self) -> float:
        """How far the best token is ahead of the second, in nats."""
        best, second = sorted(self.logprobs.values(), reverse=True)[:2]
        return best - second


@dataclass(frozen=True)
class Comparison:
    """Two generations of one prompt.

    Attributes:
        same: whether all tokens are equal.
        errors: absolute difference of the chosen token's log-probability, for each token both chose.
        margin_errors: absolute difference of the margin between the reference's two best tokens, for each step
            whose context is the same and in which the other engine has both among its best few.
        margin: at the first difference, the reference's margin; None where there is none.
        distance: at the first difference, how far the other's choice is behind the reference's best, by the
            reference; None where it is not among the reference's best few.
    """

    same: bool
    errors: tuple[float, ...]
    margin_errors: tuple[float, ...]
    margin: float | None = None
    distance: float | None = None


def compare(reference: Sequence[Step], other: Sequence[Step]) -> Comparison:
    """Compare two generations up to and with their first difference."""
    errors: list[float] = []
    margin_errors: list[float] = []
    for ours, theirs in zip(reference, other, strict=False):
        margin_errors += _margin_error(ours, theirs)
        if ours.token != theirs.token:
            best = max(ours.logprobs.values())
            behind = ours.logprobs.get(theirs.token)
            distance = None if behind is None else best - behind
            return Comparison(False, tuple(errors), tuple(margin_errors), ours.margin, distance)
        errors.append(abs(ours.logprobs[ours.token] - theirs.logprobs[theirs.token]))
    return Comparison(len(reference) == len(other), tuple(errors), tuple(margin_errors))


def _margin_error(ours: Step, theirs: Step) -> list[float]:
    """How much the margin between the reference's two best tokens differs; empty where it can't be told."""
    best, second = sorted(ours.logprobs, key=lambda token: ours.logprobs[token], reverse=True)[:2]
    if best not in theirs.logprobs or second not in theirs.logprobs:
        return []
    return [abs(ours.margin - (theirs.logprobs[best] - theirs.logprobs[second]))]


def generate(model: str, case: Case) -> list[list[Step]]:
    """Run a case in a child process, one list of steps a prompt."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        fields = ("batch", "backend", "kv", "options", "tokens")
        request = json.dumps({name: getattr(case, name) for name in fields})
        command = [sys.executable, "-m", __spec__.name, "--model", model, "--child", request, answer.name]
        # The engine in the child itself: two more processes would import vLLM for 20 s, and say the same.
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **case.environment}
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
        texts = json.load(answer)
    return [[Step(token, {int(k): v for k, v in tops.items()}) for token, tops in steps] for steps in texts]


def run_child(model: str, request: dict[str, Any], answer: Path) -> None:
    """The child: generate, and write tokens and log-probabilities to ``answer``."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415  (seconds; the parent does without)

    llm = LLM(
        model,
        attention_config={"backend": request["backend"]},
        kv_cache_dtype=request["kv"],
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        **request["options"],
    )
    params = SamplingParams(temperature=0, max_tokens=request["tokens"], logprobs=TOP)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    rounds = 2 if request["options"].get("enable_prefix_caching") else 1
    outputs: list[Any] = []
    for _ in range(rounds):
        outputs = []
        for first in range(0, len(chats), request["batch"]):
            outputs += llm.chat(chats[first : first + request["batch"]], params, use_tqdm=False)
    texts = [
        [
            [token, {str(key): value.logprob for key, value in tops.items()}]
            for token, tops in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for output in outputs
    ]
    answer.write_text(json.dumps(texts))


def row(model: str, case: Case, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The figures of one case, in nats."""
    errors = sorted(error for comparison in comparisons for error in comparison.errors)
    margin_errors = sorted(error for comparison in comparisons for error in comparison.margin_errors)
    margins = sorted(c.margin for c in comparisons if c.margin is not None)
    distances = [c.distance for c in comparisons if c.margin is not None]
    return {
        "model": Path(model).name,
        "case": case.name,
        "backend": case.backend,
        "kv": case.kv,
        "prompts": len(comparisons),
        "same_text": sum(comparison.same for comparison in comparisons),
        "tokens_compared": len(errors),
        "logprob_error_median": round(statistics.median(errors), 4),
        "logprob_error_p99": round(_quantile(errors, 0.99), 4),
        "margin_error_p99": round(_quantile(margin_errors, 0.99), 4),
        "margin_error_max": round(margin_errors[-1], 4),
        "divergence_margins": [round(margin, 3) for margin in margins],
        "divergences_outside_top5": distances.count(None),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def measure(
    model: str, cases: Sequence[Case] = (NOISE, STOCK_FP8, FALLBACK, *CASES), reference: Case = REFERENCE
) -> list[dict[str, Any]]:
    """One row a case, each against the reference."""
    expected = generate(model, reference)
    rows = []
    for case in cases:
        comparisons = [compare(*pair) for pair in zip(expected, generate(model, case), strict=True)]
        rows.append(row(model, case, comparisons))
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, help="result file; without it the rows are only printed")
    parser.add_argument("--child", nargs=2, metavar=("REQUEST", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        request, answer = options.child
        run_child(options.model, json.loads(request), Path(answer))
        return
    rows = measure(options.model)
    if options.out:
        write_result(
            options.out,
            what="greedy agreement with CPU_ATTN over a bf16 cache: log-probabilities up to the first difference, in "
            "nats, and the reference's margin there",
            command="scripts/bench agreement",
            rows=rows,
        )


if __name__ == "__main__":
    main()
