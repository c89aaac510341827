"""The status page on a stage: the real router and pulse, with a report, an engine and a board that the test sets."""

import asyncio
import contextlib
import copy
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from appliance.board import BoardSampler, read_board
from appliance.events import page_router
from appliance.pulse import Pulse
from tests.appliance.board_tree import build

REPORT = {
    "version": "0.1.0",
    "state": "ready",
    "progress": None,
    "last_fault": None,
    "restarts": 1,
    "failed_starts": 0,
    "model": "Qwen3-8B-FP8",
    "url": "http://127.0.0.1:8000",
    "uptime_seconds": 4000.0,
    "ready_seconds": 3720.0,
    "counters": {"t5:decode": 0},
    "groups": [{"group": "decoder", "kv_format": "fp8", "fallback": "FLASH_ATTN", "reason": ""}],
    "log_tail": ["INFO 12-02 22:00:01 [loggers.py:1] Engine 000: Avg generation throughput: 38.2 tokens/s"],
}


class FakeResponse:
    def __init__(self, page: str) -> None:
        self._page = page.encode()
        self.content = self

    async def read(self, _most: int) -> bytes:
        return self._page

    async def __aenter__(self) -> "FakeResponse":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class FakeEngine:
    """Answers with vLLM's metrics, labels included."""

    def __init__(self) -> None:
        self.tokens = 1000.0
        self.asked = 0

    def get(self, url: str, **_: object) -> FakeResponse:
        assert url == "http://engine/metrics"
        self.asked += 1
        labels = '{engine="0",model_name="m"}'
        return FakeResponse(
            f"# HELP vllm:num_requests_running x\nvllm:num_requests_running{labels} 3.0\n"
            f"vllm:num_requests_waiting{labels} 2.0\nvllm:kv_cache_usage_perc{labels} 0.25\n"
            f"vllm:generation_tokens_total{labels} {self.tokens}\nvllm:generation_tokens_created{labels} 1.7e9\n"
        )


class Stage:
    """What a test moves: ``report``, ``engine``, ``sampler``; ``pulse.take()`` shows it."""

    def __init__(self, tree: Path) -> None:
        self.report = copy.deepcopy(REPORT)
        self.engine = FakeEngine()
        self.now = 0.0
        self.sampler = BoardSampler(lambda: read_board(build(tree)), clock=lambda: self.now)
        self.pulse = Pulse(lambda _: copy.deepcopy(self.report), self.sampler, lambda: self.engine)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def step(self, t5: int = 0, tokens: float = 0.0, **fallback: int) -> None:
        """Let two seconds of work happen and take a point."""
        counters = self.report["counters"]
        counters["t5:decode"] += t5
        for reason, steps in fallback.items():
            counters[f"fallback:{reason}"] = counters.get(f"fallback:{reason}", 0) + steps
        self.engine.tokens += tokens
        self.now += 2.0
        self.sampler.sample()
        await self.pulse.take()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator["Stage"]:
        """The page is up while the context lasts, on the same port every time."""
        api = FastAPI(openapi_url=None)
        api.include_router(page_router(self.pulse))
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            self.port = listener.getsockname()[1]
            config = uvicorn.Config(api, lifespan="off", log_config=None, timeout_graceful_shutdown=0)
            server = uvicorn.Server(config)
            server.capture_signals = contextlib.nullcontext
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
                await asyncio.sleep(0.01)
            try:
                yield self
            finally:
                server.should_exit = True
                await task
