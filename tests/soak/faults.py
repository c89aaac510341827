"""What goes wrong during a soak, on purpose: to the engine's processes, and by clients."""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import psutil


@dataclass(frozen=True)
class Target:
    """The appliance under load.

    Attributes:
        url: its address.
        model: name of its model.
        process: the supervisor.
    """

    url: str
    model: str
    process: psutil.Process

    def core(self) -> psutil.Process:
        """The process that runs the model."""
        return self._find("EngineCore")

    def api_server(self) -> psutil.Process:
        """The engine's HTTP process: the engine core's parent."""
        return psutil.Process(self.core().ppid())

    def _find(self, word: str) -> psutil.Process:
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in " ".join(child.cmdline()):
                    return child
        raise LookupError(f"the engine has no process {word}")

    def connect(self) -> socket.socket:
        """A plain connection, for what no HTTP client sends."""
        address = urlsplit(self.url)
        return socket.create_connection((str(address.hostname), int(address.port or 80)), timeout=10)

    def request(self, tokens: int) -> bytes:
        """A request for a stream, as bytes."""
        body = {"model": self.model, "prompt": "On", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        return head.encode() + data


async def kill_core(target: Target) -> None:
    """SIGKILL for the process that runs the model."""
    target.core().kill()


async def kill_api_server(target: Target) -> None:
    """SIGKILL for the engine's HTTP process; its core outlives it."""
    target.api_server().kill()


async def freeze_core(target: Target) -> None:
    """SIGSTOP while requests run: /health of the engine stays 200."""
    target.core().suspend()


async def freeze_api_server(target: Target) -> None:
    """SIGSTOP for the engine's HTTP process: nothing of the engine answers."""
    target.api_server().suspend()


async def end_politely(target: Target) -> None:
    """SIGTERM for the engine: it ends unasked, with exit code 0."""
    target.api_server().send_signal(signal.SIGTERM)


async def two_hundred_leave(target: Target) -> None:
    """200 clients that leave in the middle of their streams."""
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(target.url, timeout=timeout, connector=connector) as session:

        async def one() -> None:
            body = {"model": target.model, "prompt": "On", "max_tokens": 256, "ignore_eos": True, "stream": True}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.post("/v1/completions", json=body) as answer:
                    await answer.content.readany()
                    answer.close()

        tasks = [asyncio.create_task(one()) for _ in range(200)]
        await asyncio.wait(tasks, timeout=10)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def never_reads(target: Target) -> None:
    """Eight clients that ask for long streams, never read them, and hang up after 15 s."""
    connections = [target.connect() for _ in range(8)]
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(target.request(512))
    await asyncio.sleep(15)
    for connection in connections:
        connection.close()


async def hostile(target: Target) -> None:
    """What no client sends: each must be answered with an error or a closed connection."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    smuggled = b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n"
    payloads = [
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: " + b"y" * (1 << 20) + b"\r\n\r\n",
        post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + smuggled,
        post + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}{}",
        post + b'Content-Length: 9\r\n\r\n{"model":',
        b"GET /v1/../metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 4096,
    ]
    for payload in payloads:
        with contextlib.suppress(OSError), target.connect() as connection:
            connection.sendall(payload)
            await asyncio.to_thread(_drain, connection)


def _drain(connection: socket.socket) -> None:
    connection.settimeout(2)
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


FAULTS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "engine core killed": kill_core,
    "200 clients leave mid-stream": two_hundred_leave,
    "engine core stopped (SIGSTOP)": freeze_core,
    "hostile HTTP": hostile,
    "API server killed": kill_api_server,
    "clients that never read": never_reads,
    "engine ends with exit code 0": end_politely,
    "API server stopped (SIGSTOP)": freeze_api_server,
}
