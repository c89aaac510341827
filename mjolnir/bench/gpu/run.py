"""Runs everything that T5 inside vLLM is checked and timed by on a GPU; one JSON file, written after each case.

Engines start side by side, since starting keeps the CPU busy and not the GPU; what is timed then runs on one engine at
a time, in turns, so that a drift of the machine meets all of them alike. An engine that fails is recorded with the
first cause, and the rest goes on.
"""

import abc
import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mjolnir.bench.gpu import report, tables
from mjolnir.bench.gpu.cases import (
    SHAPES,
    Engine,
    agreement_engines,
    cells,
    prompts,
    speed_engines,
    write_model,
    write_scales,
)
from mjolnir.bench.gpu.process import EngineFailedError, EngineProcess

WARM, STEPS = 4, 28
ENOUGH = 45  # seconds, to begin with a group
ROUNDS = {"T5": 3, "FLASH_ATTN": 3}  # others: 2


class Run:
    """One run: where it writes, what it has found, and how long it may still take."""

    def __init__(self, out: Path, device: str, seconds: float, folder: Path) -> None:
        self.out = out
        self.device = device
        self.folder = folder
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []

    @property
    def seconds_left(self) -> float:
        """Until nothing new is begun."""
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        """A line of progress."""
        sys.stderr.write(f"[{time.monotonic() - self.began:6.1f} s] {text}\n")
        sys.stderr.flush()

    def record(self, kind: str, **row: Any) -> None:
        """Keep a row, and write the file anew."""
        self.rows.append({"kind": kind, **row})
        report.save(self.out, self.rows, self.failures)

    def fail(self, where: str, error: Exception) -> None:
        """Keep a failure, and write the file anew."""
        self.failures.append({"where": where, "cause": str(error)})
        self.say(f"FAILED {where}: {error}")
        report.save(self.out, self.rows, self.failures)

    def start(self, engine: Engine) -> EngineProcess:
        """Begin to start an engine."""
        shape = SHAPES[engine.shape].small_vocab()
        model = write_model(shape, engine.layers, self.folder)
        name = f"{engine.shape}-{engine.name.replace(' ', '-')}-{engine.layers}"
        environment = {
            "MJOLNIR_STATS_DIR": str(self.folder / "stats"),
            "MJOLNIR_ATTN_BANNER": "0",
            "MJOLNIR_ATTN_KERNEL_CACHE": str(self.folder / "kernels"),
            # One each: engines that start side by side would write the same files.
            "VLLM_CACHE_ROOT": str(self.folder / f"cache-{name}"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **engine.environment,
        }
        if engine.kv == "fp6_e2m3":
            environment["MJOLNIR_KV_SCALES"] = str(write_scales(shape, engine.layers, model))
        options = dict(engine.options)
        speculative = options.get("speculative_config")
        if speculative is not None and speculative.get("model") == "MODEL":
            options["speculative_config"] = {**speculative, "model": str(model)}
        arguments = replace(engine, options=options).arguments(model, self.device)
        return EngineProcess(engine.name, arguments, environment, self.out.with_name(f"{self.out.stem}-{name}.log"))


class Group(abc.ABC):
    """Engines of one shape that are asked the same."""

    cache = False  # whether their caches are filled with random values

    def __init__(self, run: Run, shape: str, wanted: Sequence[Engine]) -> None:
        self.run = run
        self.shape = shape
        self.wanted = {engine.name: engine for engine in wanted}
        self.processes: dict[str, EngineProcess] = {}
        self.ready: dict[str, EngineProcess] = {}

    def start(self) -> None:
        """Begin to start all of them, unless that was done."""
        if not self.processes:
            self.processes = {name: self.run.start(engine) for name, engine in self.wanted.items()}

    def wait(self) -> None:
        """Wait for all of them; those that fail are recorded."""
        for name, process in self.processes.items():
            where = f"{self.shape}: {name}"
            try:
                process.wait_until_started(max(20.0, min(240.0, self.run.seconds_left)))
                facts = process.ask("prepare", cache=self.cache)
                layers = self.wanted[name].layers
                self.run.record("engine", shape=self.shape, layers=layers, engine=name, **facts)
                self.run.say(f"{where}: ready after {facts['start_seconds']} s")
                self.ready[name] = process
            except EngineFailedError as error:
                self.run.fail(where, error)
                process.stop()

    def stop(self) -> None:
        """End all of them."""
        for process in self.processes.values():
            process.stop()

    @abc.abstractmethod
    def measure(self) -> None:
        """Ask them."""


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


def run_groups(run: Run, agreements: Sequence[Group], speeds: Sequence[Group], ahead: int) -> None:
    """All groups in order; what is not timed starts at once, and ``ahead`` of those that are timed with it."""
    groups = [*agreements, *speeds]
    try:
        if run.seconds_left > ENOUGH:
            for group in (*agreements, *speeds[:ahead]):
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
    parser.add_argument("--ahead", type=int, default=1, help="groups of --speed whose engines start at once")
    parser.add_argument("--fp6", action="store_true", help="time T5 over fp6_e2m3 too")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 32768, 131072])
    options = parser.parse_args(arguments)
    kinds = ("agree", "agree_few", "speed")
    wanted = {kind: [_numbers(parser, text) for text in getattr(options, kind)] for kind in kinds}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with tempfile.TemporaryDirectory(prefix="mjolnir-gpu-") as folder:
        run = Run(options.out, options.device, options.seconds, Path(folder))
        agreements = [Agreement(run, *numbers, few=False) for numbers in wanted["agree"]]
        agreements += [Agreement(run, *numbers, few=True) for numbers in wanted["agree_few"]]
        speeds = [
            Speed(run, shape, layers, options.streams, options.contexts, tokens, options.fp6)
            for shape, layers, tokens in wanted["speed"]
        ]
        run_groups(run, agreements, speeds, options.ahead)
    sys.stdout.write(tables.render(run.rows, run.failures))
    raise SystemExit(1 if report.failed(run.rows, run.failures) else 0)


def _numbers(parser: argparse.ArgumentParser, text: str) -> tuple[str, int, int]:
    shape, *numbers = text.split(":")
    if shape not in SHAPES or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        parser.error(f"{text}: accepted: SHAPE:NUMBER:NUMBER, with a shape of {', '.join(SHAPES)}")
    return shape, int(numbers[0]), int(numbers[1])


if __name__ == "__main__":
    main()
