"""Mixed steps split or not: two engines that differ in that alone, under the same load of prompts and decodes.

First both are asked the same prompts at once, and the answers compared. Then requests come all at once, which shows
what an engine can do at most; and then at random moments, at a share of that rate, so that most steps have a part of
a prompt and decodes in them. Engines take turns, and each round begins with the other one.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mjolnir.bench.gpu import report
from mjolnir.bench.gpu.cases import SHAPES, SPLIT, Engine, prompts
from mjolnir.bench.gpu.groups import Group, Run
from mjolnir.bench.gpu.process import EngineFailedError

WHOLE, IN_TWO = "T5", "T5 split"
ROUNDS = 2
MARGIN = 64  # tokens that a request leaves free below the longest sequence


@dataclass(frozen=True)
class Mix:
    """What requests look like: shortest and longest prompt and answer, in tokens, and how many come at once."""

    prompt: tuple[int, int]
    answer: tuple[int, int]
    burst: int
    chunk: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt[1] + self.answer[1] + MARGIN


SERVING = Mix(prompt=(2048, 16384), answer=(128, 256), burst=32, chunk=2048)
SMALL = Mix(prompt=(16, 128), answer=(12, 24), burst=10, chunk=64)  # for the driver itself on a CPU


@dataclass(frozen=True)
class Arrival:
    """A request: seconds after the beginning, and tokens of its prompt and its answer."""

    at: float
    prompt: int
    answer: int


def arrivals(mix: Mix, seed: int, rate: float | None = None, seconds: float = 0.0) -> list[Arrival]:
    """Requests of a load; the same for the same arguments.

    Args:
        mix: what they look like; prompts are as often between 2K and 4K as between 8K and 16K.
        seed: of all that is random.
        rate: requests a second, of a Poisson process; None for a burst at once.
        seconds: for how long they arrive.
    """
    chance = random.Random(seed)  # noqa: S311  (a load, not a secret)
    found: list[Arrival] = []
    at = 0.0
    while True:
        if rate is not None:
            at += chance.expovariate(rate)
        if len(found) >= mix.burst if rate is None else at >= seconds:
            return found
        prompt = round(math.exp(chance.uniform(*map(math.log, mix.prompt))))
        found.append(Arrival(round(at, 6), prompt, chance.randint(*mix.answer)))


def mixed_engines(shape: str, layers: int, tokens: int, device: str) -> list[Engine]:
    """The two engines, each with a cache of ``tokens`` tokens."""
    mix = mix_for(device)
    options = {
        "random_weights": True,
        "max_model_len": mix.longest,
        "max_num_batched_tokens": mix.chunk,
        "kv_cache_memory_bytes": tokens * SHAPES[shape].kv_bytes(layers, "fp8"),
        # Model Runner V1 of a CPU: fewer requests at a time, so that some wait.
        **({"max_num_seqs": 8} if device == "cpu" else {}),
    }
    whole = Engine(WHOLE, shape, layers, options=options, environment={"MJOLNIR_ATTN_SPLIT_MIXED": "0"})
    return [whole, Engine(IN_TWO, shape, layers, options=options, environment=SPLIT, against=WHOLE)]


def mix_for(device: str) -> Mix:
    """What requests look like on a kind of device."""
    return SERVING if device == "cuda" else SMALL


class Mixed(Group):
    """A steady load of prompts and decodes, with mixed steps split and not."""

    def __init__(self, run: Run, shape: str, layers: int, tokens: int, load: float, seconds: float) -> None:
        super().__init__(run, shape, mixed_engines(shape, layers, tokens, run.device))
        self.layers = layers
        self.load = load
        self.seconds = seconds
        self.mix = mix_for(run.device)

    def measure(self) -> None:
        """Answers, then what can be done at most, then the steady load."""
        self._agree()
        burst = self._rounds("at once", [arrivals(self.mix, seed) for seed in range(ROUNDS)])
        if WHOLE not in burst:
            return
        rate = self.load * report.requests_per_second(burst[WHOLE])
        loads = [arrivals(self.mix, 100 + seed, rate, self.seconds) for seed in range(ROUNDS)]
        self._rounds("steady", loads, rate=round(rate, 2))

    def _agree(self) -> None:
        low, high = self.mix.chunk // 8, self.mix.chunk
        lengths = [low + (high - low) * number // 24 for number in range(24)]
        asked = prompts(SHAPES[self.shape].small_vocab().vocab, [min(each, self.mix.longest - 32) for each in lengths])
        expected = None
        for name, process in list(self.ready.items()):
            try:
                before = process.ask("counts")
                answer = process.ask("generate", prompts=asked, max_tokens=24)
                after = process.ask("counts")
            except EngineFailedError as error:
                self._drop(name, "answers", error)
                continue
            answers = answer.pop("answers")
            row = report.agreement_row(expected, answers, before, after)
            expected = expected or answers
            facts = {"shape": self.shape, "engine": name, "case": "24 prompts", "against": self.wanted[name].against}
            self.run.record("agreement", **facts, **answer, **row)
            self.run.say(f"{self.shape}: {name}: 24 prompts: {report.brief(row | answer)}")

    def _rounds(self, load: str, rounds: Sequence[list[Arrival]], **facts: Any) -> dict[str, list[dict[str, Any]]]:
        """All rounds of a load on both engines in turns; a row an engine is kept."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.ready}
        before = {name: process.ask("counts") for name, process in self.ready.items()}
        vocab = SHAPES[self.shape].small_vocab().vocab
        for number, load_ in enumerate(rounds):
            names = list(self.ready)
            for name in names if number % 2 == 0 else names[::-1]:
                requests = [list(asdict(each).values()) for each in load_]
                try:
                    found[name].append(self.ready[name].ask("serve", requests=requests, vocab=vocab))
                except EngineFailedError as error:
                    self._drop(name, load, error)
        found = {name: found[name] for name in self.ready if found[name]}
        for name, served in found.items():
            ran = report.difference(before[name], self.ready[name].ask("counts"))
            row = report.load_row(served) | facts | {"layers": self.layers, "engine": name, "load": load}
            self.run.record("load", shape=self.shape, **row, **ran)
            self.run.say(f"{self.shape}: {name}: {load}: {report.brief_load(row | ran)}")
        return found

    def _drop(self, name: str, what: str, error: EngineFailedError) -> None:
        self.run.fail(f"{self.shape}: {name}: {what}", error)
        self.ready.pop(name).stop()
