"""Mixed load: clients that ask, stream, tokenise and leave early, and what became of each request."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

STREAM_TOKENS = (8, 32, 96)
_SECONDS = 300.0
# What a client of a busy or restarting appliance is told; it comes with Retry-After and costs it another try.
REFUSALS = frozenset((429, 503))


class Load:
    """Clients in a loop until ``stop``.

    Attributes:
        outcomes: how requests ended: ``complete``, ``error event``, ``error answer`` (500 or 502 in OpenAI's
            envelope: the engine died over it), ``refused``, ``left`` (by the client's own will).
        corrupted: one line for each that ended in no allowed way.
        lost: one line for each connection that the appliance itself cut or refused.
    """

    def __init__(self, url: str, model: str, clients: int, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.corrupted: list[str] = []
        self.lost: list[str] = []
        self._url, self._model = url, model
        self._random = random.Random(seed)  # noqa: S311  (which request comes next)
        self._stopping = asyncio.Event()
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Let the clients begin."""
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    async def stop(self) -> None:
        """Let each client finish its request, and end."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        kinds: list[Callable[[aiohttp.ClientSession], Any]] = [
            self._stream,
            self._stream,
            self._whole,
            self._tokenize,
            self._leave,
        ]
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with aiohttp.ClientSession(self._url, timeout=timeout) as session:
            while not self._stopping.is_set():
                ask = self._random.choice(kinds)
                try:
                    refused = await ask(session)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self.lost.append(f"client {number}, {ask.__name__}: {error!r}")
                    refused = True
                if refused:  # as a client does that honours Retry-After, only sooner
                    await _first(self._stopping.wait(), 0.5)

    def _body(self, tokens: int, **more: Any) -> dict[str, Any]:
        prompt = f"Report {self._random.randrange(10**6)} says that"
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            **more,
        }

    async def _stream(self, session: aiohttp.ClientSession) -> bool:
        tokens = self._random.choice(STREAM_TOKENS)
        body = self._body(tokens, stream=True, stream_options={"include_usage": True})
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                return await self._failed(answer)
            data = b""
            try:
                async for piece in answer.content.iter_any():
                    data += piece
            except aiohttp.ClientPayloadError as error:
                self.corrupted.append(f"stream of {len(data)} bytes was cut: {error}")
                return False
        return self._judge(data, tokens)

    def _judge(self, data: bytes, tokens: int) -> bool:
        """A stream is whole events, and either all of its tokens and [DONE], or an error event as the last."""
        *events, rest = data.split(b"\n\n")
        bodies = [event.removeprefix(b"data: ") for event in events]
        if rest or not bodies or not all(event.startswith(b"data: ") for event in events):
            self.corrupted.append(f"stream is no row of events: ends with {data[-60:]!r}")
            return False
        finished = bodies[-1] == b"[DONE]"
        parsed = [json.loads(body) for body in (bodies[:-1] if finished else bodies)]
        if parsed and "error" in parsed[-1]:  # vLLM's own errors have [DONE] after them
            return self._count("error event")
        if not finished:
            self.corrupted.append(f"stream ended without [DONE] and without an error: {bodies[-1][:80]!r}")
            return False
        usage = [event["usage"] for event in parsed if event.get("usage")]
        if not usage or usage[-1]["completion_tokens"] != tokens:
            self.corrupted.append(f"stream is complete but for its tokens: {usage[-1:]} of {tokens}; {data[-300:]!r}")
            return False
        return self._count("complete")

    async def _whole(self, session: aiohttp.ClientSession) -> bool:
        async with session.post("/v1/completions", json=self._body(16)) as answer:
            if answer.status != 200:
                return await self._failed(answer)
            try:
                found = await answer.json()
            except (aiohttp.ClientPayloadError, ValueError) as error:
                self.corrupted.append(f"answer was cut: {error}")
                return False
        if found["usage"]["completion_tokens"] != 16:
            self.corrupted.append(f"answer with {found['usage']}")
            return False
        return self._count("complete")

    async def _tokenize(self, session: aiohttp.ClientSession) -> bool:
        async with session.post("/tokenize", json={"model": self._model, "prompt": "one two three"}) as answer:
            if answer.status != 200:
                return await self._failed(answer)
            if (await answer.json())["count"] < 3:
                self.corrupted.append("tokenize lost a token")
                return False
        return self._count("complete")

    async def _leave(self, session: aiohttp.ClientSession) -> bool:
        async with session.post("/v1/completions", json=self._body(512, stream=True)) as answer:
            if answer.status != 200:
                return await self._failed(answer)
            await answer.content.readany()
            answer.close()
        return self._count("left")

    async def _failed(self, answer: aiohttp.ClientResponse) -> bool:
        """An answer that is none has to say so in OpenAI's envelope."""
        data = await answer.read()
        try:
            json.loads(data)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            self.corrupted.append(f"status {answer.status} with {data[:80]!r}")
            return True
        if answer.status in REFUSALS and "Retry-After" in answer.headers:
            return self._count("refused")
        if answer.status in (500, 502):
            return self._count("error answer")
        self.corrupted.append(f"status {answer.status}, headers {list(answer.headers)}: {data[:80]!r}")
        return True

    def _count(self, outcome: str) -> bool:
        self.outcomes[outcome] += 1
        return outcome == "refused"


async def _first(event: Any, seconds: float) -> None:
    try:
        await asyncio.wait_for(event, seconds)
    except TimeoutError:
        return
