"""One real request before clients': it compiles what the first request would, and shows whether there are tokens.

It asks for log probabilities where it can. Broken attention mostly gives NaN, of which greedy sampling makes a
plausible token and JSON an error.
"""

import logging
from dataclasses import dataclass
from typing import Any

import aiohttp

from appliance.link import ENGINE

log = logging.getLogger(__name__)

_TOKENS = 8
_PROMPT = "The capital of France is"
_CHAT = [{"role": "user", "content": "What is the capital of France?"}]
# Not served, or not for this model: a pooling model has neither route, a base model no chat template.
_NOT_FOR_THIS_MODEL = (400, 404, 405, 422, 501)
_LOST = (aiohttp.ClientError, OSError, TimeoutError)


class SelfTestError(Exception):
    """The engine did not answer as it should; the message says how."""


@dataclass(frozen=True)
class Probe:
    """A request that the engine has answered well and can be asked again."""

    route: str
    body: dict[str, Any]


async def run(link: aiohttp.ClientSession) -> Probe | None:
    """Have the engine generate a few tokens.

    Returns:
        What it answered; None where the model generates no text.

    Raises:
        SelfTestError: it failed.
    """
    model = await _model(link)
    for probe in _probes(model):
        status, answer = await _ask(link, probe)
        if status == 200:
            _check(answer)
            return Probe(probe.route, {**probe.body, "max_tokens": 1})
        if status not in _NOT_FOR_THIS_MODEL:
            raise SelfTestError(f"{probe.route} answered {status}: {_message(answer)}")
    log.info("no self-test: the model answers neither chats nor completions")
    return None


async def answers(link: aiohttp.ClientSession, probe: Probe, seconds: float) -> bool:
    """Whether the engine answers a request again, with one token, within that time."""
    try:
        status, _ = await _ask(link, probe, seconds)
    except SelfTestError:
        return False
    return status == 200


def _probes(model: str) -> tuple[Probe, ...]:
    common = {"model": model, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    chat, completion = {"messages": _CHAT}, {"prompt": _PROMPT}
    return (
        Probe("/v1/chat/completions", {**common, **chat, "logprobs": True, "top_logprobs": 1}),
        Probe("/v1/chat/completions", {**common, **chat}),
        Probe("/v1/completions", {**common, **completion}),
    )


async def _model(link: aiohttp.ClientSession) -> str:
    try:
        async with link.get(f"{ENGINE}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])
    except _LOST as error:
        raise SelfTestError(f"/v1/models: {error!r}") from error
    except (ValueError, LookupError, TypeError):
        raise SelfTestError("/v1/models names no model") from None


async def _ask(link: aiohttp.ClientSession, probe: Probe, seconds: float | None = None) -> tuple[int, Any]:
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with link.post(ENGINE + probe.route, json=probe.body, timeout=timeout) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                return response.status, None
    except _LOST as error:
        raise SelfTestError(f"{probe.route}: {error!r}") from error


def _check(answer: Any) -> None:
    try:
        choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
    except (LookupError, TypeError):
        raise SelfTestError("an answer without choices or usage") from None
    if not tokens or choice.get("finish_reason") is None:
        raise SelfTestError(f"an answer of {tokens} tokens, finish_reason {choice.get('finish_reason')!r}")


def _message(answer: Any) -> str:
    try:
        return str(answer["error"]["message"])[:300]
    except (LookupError, TypeError):
        return "no message"
