"""What the proxy costs, beside a direct connection in one run: ``python -m appliance.bench_proxy --out FILE``.

Three processes on this machine: this one asks, a stub engine answers as fast as asyncio can, and the proxy stands
between them as in the appliance (keys file, queue, metrics), without a supervisor. Direct and proxied rounds take
turns, and every figure is the median of the rounds. A chunk carries the time at which the stub wrote it, so that its
delay is known to the microsecond.

The goal for short requests is meant for an engine that works at least 10 ms on each, as a real one does: against a stub
that answers at once, the direct rate is that of two processes that only pass bytes to and fro, which nothing that
parses HTTP in Python comes near.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvloop
from fastapi import FastAPI

from appliance.app import Appliance
from appliance.engine_client import EngineClient
from appliance.keys import build_gate
from appliance.metrics import Metrics
from appliance.proxy import Proxy
from appliance.queueing import AdmissionQueue, Limits
from appliance.serve import _config, _Server, listen
from appliance.tally import Tally
from mjolnir.bench.results import write_result

STREAMS, CHUNKS_PER_SECOND, IDLE = 64, 30, 1000
KEY = "bench-key-0123456789"
_STAMP = re.compile(rb"data: (\d+)\n")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_SHORT = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


# --- the stub engine ---------------------------------------------------------------------------------------


async def _stub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            query = {
                name: float(values[0]) for name, values in parse_qs(head.split(b" ")[1].partition(b"?")[2]).items()
            }
            await asyncio.sleep(query.get(b"delay", 0.0))
            if b"chunks" in query:
                await _write_chunks(writer, int(query[b"chunks"]))
            else:
                writer.write(_SHORT)
            if b"idle" in query:
                await reader.read()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _write_chunks(writer: asyncio.StreamWriter, chunks: int) -> None:
    writer.write(_HEAD)
    due = time.monotonic()
    for _ in range(chunks):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due += 1 / CHUNKS_PER_SECOND
        event = b"data: %d\n" % time.monotonic_ns() + b'data: {"choices":[{"delta":{"content":"token"}}]}\n\n'
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
    if chunks > 1:
        writer.write(b"0\r\n\r\n")


async def _serve_stub(folder: Path) -> None:
    local = await asyncio.start_unix_server(_stub, str(folder / "engine.sock"), backlog=2048)
    server = await asyncio.start_server(_stub, "127.0.0.1", 0, backlog=2048)
    _tell(server.sockets[0].getsockname()[1])
    await asyncio.gather(local.serve_forever(), server.serve_forever())


# --- the proxy ---------------------------------------------------------------------------------------------


class _Open:
    """An engine that is always ready."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def admit(self) -> EngineClient:
        return self._client

    def entered(self) -> None:
        pass

    def left(self) -> None:
        pass


async def _serve_proxy(folder: Path) -> None:
    metrics = Metrics(Tally(folder))
    gate = build_gate(folder / "keys", None, "127.0.0.1", allow_anonymous=False)
    desk = _Open(EngineClient(str(folder / "engine.sock")))
    queue = AdmissionQueue(desk, metrics, Limits(2 * IDLE, 256, 60.0))
    proxy = Proxy(desk, queue, gate, metrics, 1 << 20)
    with listen("127.0.0.1", 0) as listener:
        _tell(listener.getsockname()[1])
        gc.collect()  # as `mjolnir serve` does
        gc.freeze()
        await _Server(_config(Appliance(FastAPI(), proxy, gate, metrics))).serve(sockets=[listener])


def _tell(port: int) -> None:
    """The one line that the parent reads from our output."""
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


# --- the client --------------------------------------------------------------------------------------------


def _request(target: str) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 2\r\n\r\n"
    return head.encode() + b"{}"


async def _stream_delays(port: int, seconds: float) -> list[float]:
    """Delays of all chunks of all streams, ms."""
    delays: list[float] = []

    async def one(number: int) -> None:
        await asyncio.sleep(number / STREAMS / CHUNKS_PER_SECOND)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request(f"/v1/completions?chunks={int(seconds * CHUNKS_PER_SECOND)}"))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(65536)
            now = time.monotonic_ns()
            if not data:
                raise ConnectionError("a stream was cut off")
            delays.extend((now - int(stamp)) / 1e6 for stamp in _STAMP.findall(data))
            tail = (tail + data)[-8:]
        writer.close()

    await asyncio.gather(*map(one, range(STREAMS)))
    if len(delays) != STREAMS * int(seconds * CHUNKS_PER_SECOND):
        raise RuntimeError(f"{len(delays)} chunks came")
    return sorted(delays)


async def _sequential_rate(port: int, delay: float, seconds: float) -> float:
    """Short requests a second on one kept connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin, done = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        writer.write(_request(f"/tokenize?delay={delay}"))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        await reader.readexactly(2)
        done += 1
    writer.close()
    return done / (time.monotonic() - begin)


async def _held(port: int) -> int:
    """How many of the idle streams have begun and are all open at one time."""

    async def one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request("/v1/completions?chunks=1&idle=1"))
        await asyncio.wait_for(reader.readuntil(b"token"), 30)
        return reader, writer

    opened = [await one() for _ in range(IDLE)]
    alive = sum(not reader.at_eof() for reader, _ in opened)
    for _, writer in opened:
        writer.close()
    return alive


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class _Bench:
    """One measurement: the ports, the proxy's process, and how often and how long."""

    stub: int
    proxy: int
    pid: int
    rounds: int
    seconds: float

    async def rows(self) -> list[dict[str, Any]]:
        """All figures."""
        rows = await self._streams()
        for milliseconds in (2, 10, 50, 0):
            rows += await self._sequential(milliseconds)
        return [*rows, _row("idle streams held", [(await _held(self.stub), await _held(self.proxy))])]

    async def _streams(self) -> list[dict[str, Any]]:
        p50, p99, cores = [], [], []
        for _ in range(self.rounds):
            direct = await _stream_delays(self.stub, self.seconds)
            before, began = _cpu_seconds(self.pid), time.monotonic()
            proxied = await _stream_delays(self.proxy, self.seconds)
            cores.append((0.0, (_cpu_seconds(self.pid) - before) / (time.monotonic() - began)))
            p50.append((_share(direct, 50), _share(proxied, 50)))
            p99.append((_share(direct, 99), _share(proxied, 99)))
        case = f"{STREAMS} streams x {CHUNKS_PER_SECOND}/s"
        added = [(0.0, proxied - direct) for direct, proxied in p99]
        return [
            _row(f"{case}: delay of a chunk, ms, p50", p50),
            _row(f"{case}: delay of a chunk, ms, p99", p99),
            _row(f"{case}: added at p99, ms (goal: under 2)", added),
            _row(f"{case}: cores used by the proxy (goal: under 0.5)", cores),
        ]

    async def _sequential(self, milliseconds: int) -> list[dict[str, Any]]:
        rates, costs = [], []
        for _ in range(self.rounds):
            direct = await _sequential_rate(self.stub, milliseconds / 1e3, self.seconds / 2)
            before = _cpu_seconds(self.pid)
            proxied = await _sequential_rate(self.proxy, milliseconds / 1e3, self.seconds / 2)
            costs.append((0.0, (_cpu_seconds(self.pid) - before) / (proxied * self.seconds / 2) * 1e3))
            rates.append((direct, proxied))
        goal = "" if milliseconds else ", no goal"
        rows = [_row(f"sequential requests/s, {milliseconds} ms each in the engine{goal}", rates)]
        return rows if milliseconds else [*rows, _row("the same: the proxy's CPU time a request, ms", costs)]


def _share(values: list[float], percent: int) -> float:
    return values[len(values) * percent // 100]


def _row(case: str, rounds: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of (direct, proxied) pairs, and from where to where the proxied one went."""
    direct, proxied = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratios = [after / before for before, after in rounds if before]
    return {
        "case": case,
        "direct": round(direct, 3) if ratios else None,
        "proxied": round(proxied, 3),
        "ratio": round(statistics.median(ratios), 3) if ratios else None,
        "proxied_range": [round(pick(pair[1] for pair in rounds), 3) for pick in (min, max)],
    }


@contextlib.contextmanager
def _child(role: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Process id and port of a part of the bench that runs beside this one.

    Raises:
        RuntimeError: it ended instead of telling its port.
    """
    command = [sys.executable, "-m", "appliance.bench_proxy", "--role", role, "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            line = process.stdout.readline() if process.stdout else b""
            if not line:
                raise RuntimeError(f"the {role} did not start")
            yield process.pid, int(line)
        finally:
            process.kill()


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m appliance.bench_proxy")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--role", choices=("stub", "proxy"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        uvloop.run(_serve_stub(options.folder) if options.role == "stub" else _serve_proxy(options.folder))
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys").write_text(f"bench:{KEY}\n")
        (folder / "keys").chmod(0o600)
        with _child("stub", folder) as (_, stub), _child("proxy", folder) as (pid, proxy):
            rows = uvloop.run(_Bench(stub, proxy, pid, options.rounds, options.seconds).rows())
    for row in rows:
        sys.stdout.write(f"{row}\n")
    if options.out:
        write_result(
            options.out,
            what=f"what the proxy costs beside a direct connection to a stub engine; medians of {options.rounds} "
            f"alternating rounds; stub, proxy and client share the cores; load average before: {load:.2f}",
            command="scripts/bench proxy",
            rows=rows,
        )


if __name__ == "__main__":
    main()
