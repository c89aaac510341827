"""What the proxy costs, beside a direct connection in one run: ``python -m appliance.bench_proxy --out FILE``.

Three processes on this machine: this one asks, a stub engine answers as fast as asyncio can, and the proxy stands
between them as in the appliance (keys file, queue, metrics), without a supervisor. Direct and proxied rounds take
turns. A chunk carries the time at which the stub wrote it, so that its delay is known to the microsecond.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import aiohttp
import uvloop
from fastapi import FastAPI

from appliance.app import Appliance
from appliance.keys import build_gate
from appliance.metrics import Metrics
from appliance.proxy import Proxy, engine_session
from appliance.queueing import AdmissionQueue, Limits
from appliance.serve import _config, _Server, listen
from appliance.tally import Tally
from mjolnir.bench.results import write_result

STREAMS, CHUNKS_PER_SECOND, IDLE = 64, 30, 1000
KEY = "bench-key-0123456789"
_STAMP = re.compile(rb"data: (\d+)\n")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_SHORT = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

Opener = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


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
    _publish(folder / "stub", server.sockets[0].getsockname()[1])
    await asyncio.gather(local.serve_forever(), server.serve_forever())


# --- the proxy ---------------------------------------------------------------------------------------------


class _Open:
    """An engine that is always ready."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def admit(self) -> aiohttp.ClientSession:
        return self._session

    def entered(self) -> None:
        pass

    def left(self) -> None:
        pass


async def _serve_proxy(folder: Path) -> None:
    metrics = Metrics(Tally(folder))
    gate = build_gate(folder / "keys", None, "127.0.0.1", allow_anonymous=False)
    async with engine_session(str(folder / "engine.sock")) as session:
        desk = _Open(session)
        queue = AdmissionQueue(desk, metrics, Limits(2 * IDLE, 256, 60.0))
        proxy = Proxy(desk, queue, gate, metrics, 1 << 20)
        with listen("127.0.0.1", 0) as listener:
            _publish(folder / "proxy", listener.getsockname()[1])
            await _Server(_config(Appliance(FastAPI(), proxy, gate, metrics))).serve(sockets=[listener])


def _publish(path: Path, port: int) -> None:
    path.with_suffix(".new").write_text(str(port))
    path.with_suffix(".new").rename(path)


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


async def _measure(stub: int, proxy: int, pid: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    delays: dict[int, list[float]] = {stub: [], proxy: []}
    busy = []
    for _ in range(rounds):
        for port in (stub, proxy):
            before, began = _cpu_seconds(pid), time.monotonic()
            delays[port] += await _stream_delays(port, seconds)
            if port == proxy:
                busy.append((_cpu_seconds(pid) - before) / (time.monotonic() - began))
    rows = [
        _row(
            f"{STREAMS} streams x {CHUNKS_PER_SECOND}/s, delay of a chunk, ms, p{share}",
            *(_share(delays[port], share) for port in (stub, proxy)),
        )
        for share in (50, 99)
    ]
    rows.append(
        {"case": "the same: cores used by the proxy", "direct": 0.0, "proxied": round(max(busy), 3), "ratio": None}
    )
    for milliseconds in (0, 10, 50):
        pairs = [
            [await _sequential_rate(port, milliseconds / 1e3, 2.0) for port in (stub, proxy)] for _ in range(rounds)
        ]
        direct, proxied = (sorted(pair[side] for pair in pairs)[rounds // 2] for side in (0, 1))
        rows.append(_row(f"sequential requests a second, {milliseconds} ms each in the engine", direct, proxied))
    rows.append(_row("idle streams held", await _held(stub), await _held(proxy)))
    return rows


def _share(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def _row(case: str, direct: float, proxied: float) -> dict[str, Any]:
    return {"case": case, "direct": round(direct, 3), "proxied": round(proxied, 3), "ratio": round(proxied / direct, 3)}


def _start(role: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen([sys.executable, "-m", "appliance.bench_proxy", "--role", role, "--folder", str(folder)])
    deadline = time.monotonic() + 60
    while not (folder / role).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the {role} did not start")
        time.sleep(0.05)
    return process, int((folder / role).read_text())


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m appliance.bench_proxy")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--role", choices=("stub", "proxy"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        uvloop.run(_serve_stub(options.folder) if options.role == "stub" else _serve_proxy(options.folder))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys").write_text(f"bench:{KEY}\n")
        (folder / "keys").chmod(0o600)
        processes = []
        try:
            for role in ("stub", "proxy"):
                processes.append(_start(role, folder))
            (_, stub), (proxy_process, proxy) = processes
            rows = uvloop.run(_measure(stub, proxy, proxy_process.pid, options.rounds, options.seconds))
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
    for row in rows:
        sys.stdout.write(f"{row}\n")
    if options.out:
        what = "what the proxy costs, beside a direct connection to a stub engine in the same run"
        write_result(
            options.out,
            what=what,
            command="python -m appliance.bench_proxy --out docs/results/proxy/proxy.json",
            rows=rows,
        )


if __name__ == "__main__":
    main()
