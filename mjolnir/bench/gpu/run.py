"""Runs everything that T5 inside vLLM is checked and timed by on a GPU; one JSON file, written after each case.

Engines start side by side, since starting keeps the CPU busy and not the GPU; what is timed then runs on one engine at
a time, in turns, so that a drift of the machine meets all of them alike. An engine that fails is recorded with the
first cause, and the rest goes on.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjolnir.bench.gpu import report, tables
from mjolnir.bench.gpu.cases import SHAPES, agreement_engines, cells, prompts, speed_engines
from mjolnir.bench.gpu.groups import Group, Run
from mjolnir.bench.gpu.mixed import Mixed
from mjolnir.bench.gpu.process import EngineFailedError

WARM, STEPS = 4, 28
ENOUGH = 45  # seconds, to begin with a group
ROUNDS = {"T5": 3, "FLASH_ATTN": 3}  # others: 2


class Agreement(Group):
    """Does T5 say what the fallback says, and what ran meanwhile?"""

    def __init__(self, run: Run, shape: str, layers: int, long: int, few: bool) -> None:
        super().__init__(run, shape, agreement_engines(shape, layers, long + 256, run.device, few))
        self.long = long
        self.expected: dict[tuple[str, str], Any] = {}

    def measure(self) -> None:
        """All prompts to all engines."""
        lengths = {
            "16 prompts": [48 + 37 * number for number in range(16)],
            "64 skewed": [16 + 5 * number for number in range(63)] + [min(4096, self.long)],
            "one long": [self.long],
        }
        if self.run.device == "cpu":
            lengths = {"16 prompts": [20 + 7 * number for number in range(4)], "one long": [self.long]}
        for text, each in lengths.items():
            for name in self.ready:
                if max(each) + 48 > self.wanted[name].options["max_model_len"]:
                    continue
                self._ask(name, text, text, each, 48 if text == "16 prompts" else 24)
        if "T5" in self.ready:
            self._ask("T5", "16 prompts, prefixes cached", "16 prompts", lengths["16 prompts"], 48)

    def _ask(self, name: str, case: str, text: str, lengths: Sequence[int], tokens: int) -> None:
        process, where = self.ready[name], f"{self.shape}: {name}: {case}"
        asked = prompts(SHAPES[self.shape].small_vocab().vocab, lengths)
        try:
            before = process.ask("counts")
            answer = process.ask("generate", prompts=asked, max_tokens=tokens)
            after = process.ask("counts")
        except EngineFailedError as error:
            self.run.fail(where, error)
            return
        answers = answer.pop("answers")
        against = self.wanted[name].against
        if not against:
            self.expected[name, text] = answers
        row = report.agreement_row(self.expected.get((against or name, text)), answers, before, after)
        self.run.record("agreement", shape=self.shape, engine=name, case=case, against=against, **answer, **row)
        self.run.say(f"{where}: {report.brief(row | answer)}")


class Speed(Group):
    """Times of decode steps over a filled cache, engine beside engine."""

    cache = True

    def __init__(
        self,
        run: Run,
        shape: str,
        layers: int,
        streams: Sequence[int],
        contexts: Sequence[int],
        tokens: int,
        fp6: bool,
    ) -> None:
        super().__init__(run, shape, speed_engines(shape, layers, tokens, max(contexts) + 256, run.device, fp6))
        self.layers = layers
        self.cells = cells(streams, contexts, tokens)

    def measure(self) -> None:
        """All cells, in turns."""
        before = {name: process.ask("counts") for name, process in self.ready.items()}
        for many, context in self.cells:
            if self.run.seconds_left < 10:
                self.run.say(f"{self.shape}: no time left for {many} x {context} and what follows")
                break
            times = self._times(many, context)
            for row in report.speed_rows(times, many):
                found = {"shape": self.shape, "layers": self.layers, "streams": many, "context": context}
                self.run.record("speed", **found, **row)
            self.run.say(f"{self.shape}: {many} x {context}: {report.brief_speed(times, many)}")
        for name, process in self.ready.items():
            ran = report.difference(before[name], process.ask("counts"))
            self.run.record("speed steps", shape=self.shape, engine=name, **ran)

    def _times(self, many: int, context: int) -> dict[str, list[dict[str, list[float]]]]:
        times: dict[str, list[dict[str, list[float]]]] = {name: [] for name in self.ready}
        request = {
            "streams": many,
            "context": context,
            "vocab": SHAPES[self.shape].small_vocab().vocab,
            "warm": WARM,
            "steps": STEPS,
        }
        for round_ in range(3):
            for name, process in list(self.ready.items()):
                if round_ >= ROUNDS.get(name, 2):
                    continue
                try:
                    times[name].append(process.ask("decode", seconds=60, **request))
                except EngineFailedError as error:
                    self.run.fail(f"{self.shape}: {name}: {many} x {context}", error)
                    self.ready.pop(name).stop()
        return times


def run_groups(run: Run, agreements: Sequence[Group], timed: Sequence[Group], ahead: int) -> None:
    """All groups in order; what is not timed starts at once, and ``ahead`` of those that are timed with it."""
    groups = [*agreements, *timed]
    try:
        if run.seconds_left > ENOUGH:
            for group in (*agreements, *timed[:ahead]):
                group.start()
        for group in groups:
            if run.seconds_left < ENOUGH:
                run.fail(group.shape, RuntimeError("no time left"))
                continue
            _run_group(run, group)
    finally:
        for group in groups:
            group.stop()


def _run_group(run: Run, group: Group) -> None:
    try:
        group.start()
        group.wait()
        group.measure()
    except Exception as error:  # one group's failure must not cost the others
        run.fail(group.shape, error)
    finally:
        group.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file; logs of the engines go beside it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs the driver on small models")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing new after this time")
    parser.add_argument("--agree", nargs="*", default=[], metavar="SHAPE:LAYERS:CONTEXT", help="compare the answers")
    parser.add_argument("--agree-few", nargs="*", default=[], metavar="SHAPE:LAYERS:CONTEXT", help="of T5 alone")
    parser.add_argument("--speed", nargs="*", default=[], metavar="SHAPE:LAYERS:TOKENS", help="time decode steps")
    parser.add_argument(
        "--mixed", nargs="*", default=[], metavar="SHAPE:LAYERS:TOKENS", help="split mixed steps or not"
    )
    parser.add_argument("--load", type=float, default=0.75, help="of --mixed: share of what the engine can do at most")
    parser.add_argument("--load-seconds", type=float, default=8, help="of --mixed: for how long requests arrive")
    parser.add_argument("--ahead", type=int, default=1, help="groups that are timed whose engines start at once")
    parser.add_argument("--fp6", action="store_true", help="time T5 over fp6_e2m3 too")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 32768, 131072])
    options = parser.parse_args(arguments)
    kinds = ("agree", "agree_few", "mixed", "speed")
    wanted = {kind: [_numbers(parser, text) for text in getattr(options, kind)] for kind in kinds}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with tempfile.TemporaryDirectory(prefix="mjolnir-gpu-") as folder:
        run = Run(options.out, options.device, options.seconds, Path(folder))
        agreements = [Agreement(run, *numbers, few=False) for numbers in wanted["agree"]]
        agreements += [Agreement(run, *numbers, few=True) for numbers in wanted["agree_few"]]
        timed: list[Group] = [Mixed(run, *numbers, options.load, options.load_seconds) for numbers in wanted["mixed"]]
        timed += [
            Speed(run, shape, layers, options.streams, options.contexts, tokens, options.fp6)
            for shape, layers, tokens in wanted["speed"]
        ]
        run_groups(run, agreements, timed, options.ahead)
    sys.stdout.write(tables.render(run.rows, run.failures))
    raise SystemExit(1 if report.failed(run.rows, run.failures) else 0)


def _numbers(parser: argparse.ArgumentParser, text: str) -> tuple[str, int, int]:
    shape, *numbers = text.split(":")
    if shape not in SHAPES or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        parser.error(f"{text}: accepted: SHAPE:NUMBER:NUMBER, with a shape of {', '.join(SHAPES)}")
    return shape, int(numbers[0]), int(numbers[1])


if __name__ == "__main__":
    main()
