"""The self-test against servers that answer as vLLM does for several kinds of models."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from appliance import selftest
from appliance.link import engine_link
from appliance.selftest import SelfTestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD = (200, {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 8}})
NO_TEMPLATE = (400, {"error": {"message": "As of transformers v4.44, default chat template is no longer allowed"}})
NOT_THERE = (404, {"detail": "Not Found"})


class Server:
    """Answers by route, and keeps what it was asked."""

    def __init__(self, answers: dict[str, Callable[[dict], tuple[int, object]]], models: object = None) -> None:
        self.asked: list[tuple[str, dict]] = []
        self._answers = answers
        self._models = {"data": [{"id": "m"}]} if models is None else models

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response(self._models)
        body = await request.json()
        self.asked.append((request.path, body))
        status, answer = self._answers[request.path](body)
        return web.json_response(answer, status=status)


@contextlib.asynccontextmanager
async def serving(server: Server, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "s")).start()
    try:
        async with engine_link(str(folder / "s")) as link:
            yield link
    finally:
        await runner.cleanup()


def always(answer: tuple[int, object]) -> Callable[[dict], tuple[int, object]]:
    return lambda _: answer


@pytest.mark.parametrize(
    ("answers", "asked", "route"),
    [
        ({CHAT: always(GOOD)}, [CHAT], CHAT),
        ({CHAT: lambda body: NO_TEMPLATE if "logprobs" in body else GOOD}, [CHAT, CHAT], CHAT),
        ({CHAT: always(NO_TEMPLATE), COMPLETIONS: always(GOOD)}, [CHAT, CHAT, COMPLETIONS], COMPLETIONS),
        ({CHAT: always(NOT_THERE), COMPLETIONS: always(NOT_THERE)}, [CHAT, CHAT, COMPLETIONS], None),
    ],
)
async def test_the_first_route_that_the_model_has(tmp_path, answers, asked, route):
    server = Server(answers)
    async with serving(server, tmp_path) as link:
        probe = await selftest.run(link)
        assert [path for path, _ in server.asked] == asked
        assert all((body["model"], body["max_tokens"], body["temperature"]) == ("m", 8, 0) for _, body in server.asked)
        assert (probe.route if probe else None) == route
        if probe is not None:
            assert await selftest.answers(link, probe, 10.0)
            assert server.asked[-1][1]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            (500, {"error": {"message": "Out of range float values are not JSON compliant: nan"}}),
            "answered 500: Out of",
        ),
        ((503, "x"), "answered 503: no message"),
        ((200, {"choices": []}), "an answer without choices or usage"),
        ((200, {**GOOD[1], "usage": {"completion_tokens": 0}}), "an answer of 0 tokens"),
        ((200, {**GOOD[1], "choices": [{"finish_reason": None}]}), "an answer of 8 tokens, finish_reason None"),
    ],
)
async def test_an_answer_that_is_none(tmp_path, answer, told):
    async with serving(Server({CHAT: always(answer)}), tmp_path) as link:
        with pytest.raises(SelfTestError, match=told):
            await selftest.run(link)


async def test_a_server_without_a_model(tmp_path):
    async with serving(Server({}, models={"data": []}), tmp_path) as link:
        with pytest.raises(SelfTestError, match="/v1/models names no model"):
            await selftest.run(link)


async def test_a_server_that_is_gone(tmp_path):
    async with engine_link(str(tmp_path / "none")) as link:
        with pytest.raises(SelfTestError, match="/v1/models: ") as caught:
            await selftest.run(link)
        assert caught.value.__cause__ is not None
        assert not await selftest.answers(link, selftest.Probe(CHAT, {}), 1.0)
