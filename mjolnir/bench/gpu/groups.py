"""A run of the driver, and engines of one shape that are asked the same."""

import abc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mjolnir.bench.gpu import report
from mjolnir.bench.gpu.cases import SHAPES, Engine, write_model, write_scales
from mjolnir.bench.gpu.process import EngineFailedError, EngineProcess


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
