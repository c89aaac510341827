"""One engine of the quality benchmark, in a process of its own: does what a JSON file asks, answers with another.

Tokens are never the engine's choice where two caches are compared: prompts are scored as prompts (each chunk of a
prefill reads all its keys, its own included, from the cache), and decode steps are forced along a given text, which
is how T5 gets measured. What a prompt's log-probabilities say of a decode kernel is nothing.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from mjolnir.bench import kv_probe

T = TypeVar("T")
FORCED = "forced_tokens"
CHUNK = 512  # tokens of a prefill step


class ForcedTokens(AdapterLogitsProcessor):
    """Makes requests with ``extra_args[FORCED]`` say these tokens; raw log-probabilities stay the model's."""

    def is_argmax_invariant(self) -> bool:
        """It is not."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], torch.Tensor], Any] | None:
        """The processor of one request; None for one that may choose."""
        tokens: list[int] | None = (params.extra_args or {}).get(FORCED)
        if tokens is None:
            return None

        def force(said: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, -torch.inf)
            forced[tokens[len(said)]] = 0.0
            return forced

        return force


def load(request: dict[str, Any]) -> LLM:
    """The engine that a request describes."""
    return LLM(
        request["model"],
        attention_config={"backend": request["backend"]},
        kv_cache_dtype=request["kv"],
        dtype="bfloat16",
        max_model_len=request["max_model_len"],
        max_num_batched_tokens=CHUNK,
        max_num_seqs=request["streams"],
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        logits_processors=[ForcedTokens],
        logprobs_mode="raw_logprobs",
    )


def prepare(llm: LLM, request: dict[str, Any]) -> None:
    """The emulation that the request asks for."""
    if request["emulate"]:
        scales = kv_probe.read_scales(Path(request["scales"]))
        llm.apply_model(lambda model: kv_probe.emulate_e2m3(kv_probe.attention_layers(model), scales))


def score_prompts(llm: LLM, texts: Sequence[list[int]]) -> list[dict[str, list[Any]]]:
    """Negative log-likelihood in nats of each token but the first, and the likeliest token in its place."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    return [_scores(text[1:], output.prompt_logprobs[1:]) for text, output in zip(texts, outputs, strict=True)]


def score_decode(llm: LLM, texts: Sequence[list[int]], prefix: int) -> list[dict[str, list[Any]]]:
    """As `score_prompts`, of the tokens after ``prefix``, each scored by a decode step of one token a sequence."""
    requests = [
        SamplingParams(
            temperature=0, max_tokens=len(text) - prefix, logprobs=1, ignore_eos=True,
            detokenize=False, extra_args={FORCED: text[prefix:]},
        )
        for text in texts
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": text[:prefix]} for text in texts]
    outputs = [output.outputs[0] for output in llm.generate(prompts, requests, use_tqdm=False)]
    for text, output in zip(texts, outputs, strict=True):
        if list(output.token_ids) != text[prefix:]:
            raise RuntimeError("the engine did not say what it was forced to say")
    return [_scores(text[prefix:], output.logprobs) for text, output in zip(texts, outputs, strict=True)]


def _scores(tokens: Sequence[int], logprobs: Sequence[dict[int, Any]]) -> dict[str, list[Any]]:
    return {
        "nll": [round(-entry[token].logprob, 5) for token, entry in zip(tokens, logprobs, strict=True)],
        "top": [min(entry, key=lambda token: -entry[token].logprob) for entry in logprobs],
    }


def generate(llm: LLM, chats: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, list[int]]]:
    """Long answers to chat prompts, greedy or sampled; their prompts' tokens are part of the answer."""
    params = [
        SamplingParams(temperature=chat["temperature"], seed=chat["seed"], max_tokens=tokens, ignore_eos=True)
        for chat in chats
    ]
    messages = [[{"role": "user", "content": chat["prompt"]}] for chat in chats]
    outputs = llm.chat(messages, params, use_tqdm=False)
    return [{"prompt": list(o.prompt_token_ids), "text": list(o.outputs[0].token_ids)} for o in outputs]


def cache_errors(llm: LLM, texts: Sequence[list[int]], request: dict[str, Any]) -> dict[str, Any]:
    """Relative RMS error of what the cache holds, by layer, while some texts are read."""
    scales = kv_probe.read_scales(Path(request["scales"])) if request["scales"] else None
    entered = []

    def start(model: Any) -> None:
        entered.append(kv_probe.measured(kv_probe.attention_layers(model), request["kv"], scales))

    llm.apply_model(start)
    with entered[0] as figures:
        score_prompts(llm, texts)
    return figures


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that a request asks for; see `mjolnir.bench.quality`."""
    llm = _timed("load", lambda: load(request))
    prepare(llm, request)
    found: dict[str, Any] = {}
    if "score" in request:
        found["score"] = _timed("score", lambda: score_prompts(llm, request["score"]))
        return found
    windows = request["windows"]
    if request["probe"]:
        found["layers"] = _timed("probe", lambda: cache_errors(llm, windows[: request["probe"]], request))
    found["prefill"] = _timed("prefill", lambda: score_prompts(llm, windows))
    if not request["short"]:
        forced = [window[: request["decode_end"]] for window in windows[:: request["decode_every"]]]
        found["decode"] = _timed("decode", lambda: score_decode(llm, forced, request["decode_start"]))
        found["canary"] = _timed("canary", lambda: generate(llm, request["chats"], request["canary_tokens"]))
    return found


def _timed(part: str, work: Callable[[], T]) -> T:
    begin = time.monotonic()
    result = work()
    sys.stderr.write(f"  {part}: {time.monotonic() - begin:.0f} s\n")
    return result


def main() -> None:
    """Answer one request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request", type=Path)
    parser.add_argument("answer", type=Path)
    options = parser.parse_args()
    # Probes stand in the engine's own process; its custom logits processors are those of model runner V1.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    found = answer(json.loads(options.request.read_text()))
    options.answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
