"""Mixed load on a real appliance with a fault a minute: ``scripts/soak``.

With --write, docs/results/reliability/soak-cpu.json gets the figures, and `scripts/bench tables` makes the table of
docs/reliability.md.
Exit code 1 when a fault was not recovered from in time, a stream was corrupted, a connection was lost, a counter went
backwards or a process was left.
"""

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from appliance import demo_model
from mjolnir.bench.results import write_result
from tests.soak.faults import FAULTS, Target
from tests.soak.load import Load

RESULT = Path(__file__).parents[2] / "docs" / "results" / "reliability" / "soak-cpu.json"
MARK = "MARK_OF_SOAK"  # in the environment of everything that the appliance starts
RECOVERY_SECONDS = 180.0
HANG_SECONDS = 20.0  # the default of 180 s would be most of the run
CLIENTS = 6


@dataclass
class Tally:
    """What one kind of fault did."""

    runs: int = 0
    recovered: int = 0
    seconds: list[float] = field(default_factory=list)
    corrupted: int = 0


class Watch:
    """The appliance's counters: they may only grow."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last: dict[tuple[str, str], float] = {}
        self.backwards: list[str] = []

    def look(self) -> None:
        with contextlib.suppress(OSError):
            for family in text_string_to_metric_families(fetch(f"{self._url}/metrics")):
                if family.type != "counter" or not family.name.startswith(("mjolnir_", "appliance_")):
                    continue
                for sample in family.samples:
                    if not sample.name.endswith("_total"):
                        continue
                    key = (sample.name, str(sorted(sample.labels.items())))
                    if sample.value < self._last.get(key, 0.0):
                        self.backwards.append(f"{key}: {self._last[key]} -> {sample.value}")
                    self._last[key] = sample.value


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def is_ready(url: str) -> bool:
    try:
        fetch(f"{url}/health/ready")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def appliance(folder: Path, mark: str) -> Iterator[Target]:
    """A real appliance over real vLLM and the demo's model; ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = demo_model.prepare(print)
    command = [sys.executable, "-m", "appliance.cli", "serve", "--model", str(model), "--port", str(port), "--offline"]
    command += ["--stats-dir", str(folder / "stats"), "--max-model-len", "1024", "--", "--enforce-eager"]
    settings = {"MJOLNIR_HANG_SECONDS": str(HANG_SECONDS), "MJOLNIR_CRASH_LIMIT": "1000", MARK: mark}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"soak: the appliance did not get ready: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.5)
        yield Target(url, model.name, psutil.Process(process.pid))
    finally:
        if process.poll() is None:
            process.terminate()
            if process.wait(120) != 0:
                sys.stderr.write(f"soak: the appliance ended with {process.returncode}\n")


def marked(mark: str) -> list[psutil.Process]:
    """Every process that the appliance started, wherever it is in the tree now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


async def soak(target: Target, minutes: float, interval: float) -> tuple[dict[str, Tally], Load, Watch]:
    """Load for some minutes, one fault an interval."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    load, watch = Load(target.url, target.model, CLIENTS, seed=1), Watch(target.url)
    load.start()
    names = list(FAULTS)
    end = time.monotonic() + minutes * 60
    number = 0
    while time.monotonic() < end:
        due = time.monotonic() + interval
        name = names[number % len(names)]
        number += 1
        tally, corrupted = tallies[name], len(load.corrupted)
        tally.runs += 1
        began = time.monotonic()
        await FAULTS[name](target)
        seconds = await recovery(target, load, began)
        if seconds is not None:
            tally.recovered += 1
            tally.seconds.append(seconds)
        tally.corrupted += len(load.corrupted) - corrupted
        await asyncio.to_thread(watch.look)
        how = "not recovered" if seconds is None else f"{seconds:.1f} s"
        say(f"{name}: {how}; {dict(load.outcomes)}; corrupted: {load.corrupted[corrupted:]}")
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    await load.stop()
    await asyncio.to_thread(watch.look)
    return tallies, load, watch


async def recovery(target: Target, load: Load, began: float) -> float | None:
    """Seconds until three requests in a row that began after the fault are complete; None past the limit."""
    goal = load.outcomes["complete"] + CLIENTS + 3  # what was under way does not count
    while time.monotonic() - began < RECOVERY_SECONDS:
        if load.outcomes["complete"] >= goal and await asyncio.to_thread(is_ready, target.url):
            return time.monotonic() - began
        await asyncio.sleep(0.1)
    return None


def say(line: str) -> None:
    sys.stderr.write(f"{datetime.datetime.now():%H:%M:%S} {line}\n")
    sys.stderr.flush()


def rows_of(tallies: dict[str, Tally], left: int) -> list[dict[str, Any]]:
    return [
        {
            "fault": name,
            "runs": tally.runs,
            "recovered": tally.recovered,
            "seconds, median": round(statistics.median(tally.seconds), 1) if tally.seconds else None,
            "seconds, max": round(max(tally.seconds, default=0.0), 1),
            "streams corrupted": tally.corrupted,
            "processes left": left,
        }
        for name, tally in tallies.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between two faults")
    parser.add_argument("--write", action="store_true", help="write docs/results/reliability/soak-cpu.json")
    options = parser.parse_args()
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        with appliance(Path(folder), mark) as target:
            before = target.process.memory_info().rss, target.process.num_fds()
            tallies, load, watch = asyncio.run(soak(target, options.minutes, options.interval))
            after = target.process.memory_info().rss, target.process.num_fds()
        left = [process for process in marked(mark) if process.is_running()]
    outcomes = ", ".join(f"{count} {name}" for name, count in load.outcomes.items())
    what = (
        f"recovery from faults under mixed load: {load.outcomes.total()} requests by {CLIENTS} clients "
        f"({outcomes}), {len(load.lost)} lost connections, "
        f"{len(watch.backwards)} counters that went backwards; supervisor {before[0] >> 20} -> {after[0] >> 20} MiB, "
        f"{before[1]} -> {after[1]} open files"
    )
    say(what)
    rows = rows_of(tallies, len(left))
    if options.write:
        write_result(RESULT, what=what, command=f"scripts/soak --minutes {options.minutes:g}", rows=rows)
    sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    for line in [*load.corrupted, *load.lost, *watch.backwards, *map(str, left)]:
        say(line)
    unrecovered = any(tally.recovered < tally.runs for tally in tallies.values())
    return 1 if unrecovered or load.corrupted or load.lost or watch.backwards or left else 0


if __name__ == "__main__":
    sys.exit(main())
