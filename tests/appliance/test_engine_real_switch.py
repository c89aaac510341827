"""Real vLLM as a user runs it: traces that arrive, a switch, a switch that fails, and a stop under 20 streams."""

import asyncio
import gzip
import json
import os
import queue
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest

from tests.appliance.test_cli import Served
from tests.appliance.test_engine_real import FLAGS, START_SECONDS, _samples, command, tiny

__all__ = ["command", "tiny"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

TRACE = "0af7651916cd43dd8448eb211c80319c"
STREAMS = 20
USAGE = {"include_usage": True}


@contextmanager
def collector() -> Iterator[tuple[str, "queue.Queue[tuple[str, bytes]]"]]:
    """An OTLP collector over HTTP: its address, and the path and body of all that it is sent."""
    got: queue.Queue[tuple[str, bytes]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.put((self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


def ask(served: Served, path: str, body: dict, **headers: str) -> tuple[int, dict]:
    request = urllib.request.Request(
        served.url() + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.status, json.load(answer)


def tokens(count: int, **more: object) -> dict:
    return {"model": "tiny", "prompt": "hammer", "max_tokens": count, "ignore_eos": True, "temperature": 0, **more}


async def stream(session: aiohttp.ClientSession, count: int, begun: list) -> bytes:
    async with session.post("/v1/completions", json=tokens(count, stream=True, stream_options=USAGE)) as answer:
        assert answer.status == 200
        data = await answer.content.readany()
        begun.append(count)
        return data + await answer.content.read()


async def test_traces_switch_return_and_a_stop_under_20_streams(command, tiny, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    base = f"model: {tiny}\nserved_model_name: tiny\ndescription: of a test\nneeds: {{device: cpu, memory_gib: 1}}\n"
    flags = "vllm: {enforce-eager: true}\n"
    (profiles / "wide.yaml").write_text(f"name: wide\n{base}max_model_len: 512\nmax_num_seqs: 32\n{flags}")
    (profiles / "tall.yaml").write_text(f"name: tall\n{base}max_model_len: 100000\n{flags}")
    with collector() as (address, spans):
        variables = {"MJOLNIR_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        variables["MJOLNIR_PROFILES_DIR"] = str(profiles)
        variables |= {"MJOLNIR_DRAIN_SECONDS": "60", "MJOLNIR_MAX_IN_FLIGHT": "64"}
        words = [*command, *FLAGS[:1]]
        process = subprocess.Popen(words, env={**os.environ, **variables}, stderr=subprocess.PIPE)  # noqa: ASYNC220
        served = Served(process, tmp_path / "stats")
        try:
            served.read_until(r"ready after", START_SECONDS)
            traced = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            assert ask(served, "/v1/completions", tokens(4), **traced)[1]["usage"]["completion_tokens"] == 4
            assert has_span(spans)

            assert ask(served, "/admin/profile", {"name": "wide"})[0] == 202
            served.read_until(r"switched to 'wide'", START_SECONDS)
            assert json.loads(served.get("/admin/profile"))["state"] == "done"
            assert ask(served, "/v1/completions", tokens(300))[1]["usage"]["completion_tokens"] == 300

            assert ask(served, "/admin/profile", {"name": "tall"})[0] == 202
            served.read_until(r"(?s)no switch to 'tall'.*ready after", START_SECONDS)
            told = json.loads(served.get("/admin/profile"))
            assert told["state"] == "returned"
            assert "100000" in told["reason"]
            assert ask(served, "/v1/completions", tokens(300))[1]["usage"]["completion_tokens"] == 300
            samples = _samples(served.get("/metrics"))
            assert samples["mjolnir_t5_steps_total"] > 0

            await stop_under_streams(served)
            assert served.engine_processes() == []
        finally:
            process.kill()
            process.communicate()


def has_span(spans: "queue.Queue[tuple[str, bytes]]") -> bool:
    """Whether a span of the client's own trace arrives."""
    while True:
        path, body = spans.get(timeout=60)
        assert path == "/v1/traces"
        if bytes.fromhex(TRACE) in body:
            return True


async def stop_under_streams(served: Served) -> None:
    """Each stream is whole, since the drain is long enough for all of them."""
    begun: list[int] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(served.url(), connector=connector) as session:
        asked = [asyncio.create_task(stream(session, 200, begun)) for _ in range(STREAMS)]
        while len(begun) < STREAMS:
            await asyncio.sleep(0.01)  # nothing tells when the last has begun
            assert not any(task.done() and task.exception() for task in asked)
        code = asyncio.create_task(asyncio.to_thread(served.end, signal.SIGTERM))
        for data in await asyncio.gather(*asked):
            assert data.endswith(b"data: [DONE]\n\n")
            assert json.loads(data.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]["completion_tokens"] == 200
    assert await code == 0
