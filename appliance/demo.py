"""The demo: the whole appliance on a machine without a GPU, with a small real model.

Without ``--once`` it becomes `mjolnir serve`, for a person: progress, a URL, a curl line, Ctrl-C. With ``--once`` it
starts an appliance, asks one question, reads the step counters from ``/metrics``, stops everything, and tells what
came out.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from appliance import demo_model
from appliance.errors import ApplianceError, EngineError

SERVE_FLAGS = ("--max-model-len", "2048")
MAX_TOKENS = 128

_READY_POLL_SECONDS = 0.1
_START_SECONDS = 600
_ANSWER_SECONDS = 300
_STOP_SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    """What one question showed.

    Attributes:
        answer: the model's text.
        t5_steps: engine steps that ran on T5, of all kinds.
        fallback_steps: engine steps that ran on the fallback, for all reasons.
        tokens_per_s: generated tokens a second between the first and the last.
        start_seconds: from the launch of the appliance until it was ready.
    """

    answer: str
    t5_steps: int
    fallback_steps: int
    tokens_per_s: float
    start_seconds: float


def ask_once(question: str, command: Sequence[str], port: int) -> Outcome:
    """Start an appliance, ask it one question, stop it.

    Args:
        question: what to ask.
        command: the appliance's command line.
        port: where it listens.

    Raises:
        EngineError: it did not start, did not answer or did not stop as it should.
    """
    begin = time.monotonic()
    with _appliance(command) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url)
        started = time.monotonic() - begin
        answer, tokens_per_s = _stream_answer(url, question)
        t5_steps, fallback_steps = _steps(url)
    return Outcome(answer, t5_steps, fallback_steps, round(tokens_per_s, 2), round(started, 2))


@contextmanager
def _appliance(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A running appliance, which is ended the way an operator would, whatever happens inside."""
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        yield process
    except BaseException:
        process.terminate()
        process.wait()
        raise
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise EngineError(f"the appliance did not stop within {_STOP_SECONDS} s of SIGTERM") from None
    if code != 0:
        raise EngineError(f"the appliance stopped with exit code {code}")


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            # Doubles as the pause between two looks: it returns at once when the appliance ends.
            code = process.wait(_READY_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if _is_ready(url):
                return
        else:
            raise EngineError(f"the appliance ended with exit code {code} before it was ready")
    raise EngineError(f"the appliance was not ready after {_START_SECONDS} s")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
            return True
    except OSError:
        return False


def _stream_answer(url: str, question: str) -> tuple[str, float]:
    """Ask over the streaming chat route.

    Returns:
        The text, and tokens a second between its first and its last token.
    """
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    pieces: list[str] = []
    times: list[float] = []
    tokens = 0
    with _opened(request) as reply:
        for event in _events(reply):
            if "error" in event:
                raise EngineError(f"the engine broke off its answer: {event['error'].get('message')}")
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    pieces.append(choice["delta"]["content"])
                    times.append(time.monotonic())
    if tokens < 2 or len(times) < 2:
        raise EngineError(f"the engine generated {tokens} tokens; a rate needs two")
    return "".join(pieces), (tokens - 1) / (times[-1] - times[0])


def _opened(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=_ANSWER_SECONDS)
    except urllib.error.HTTPError as error:
        raise EngineError(f"the appliance answered {error.code}: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise EngineError(f"the appliance does not answer: {error}") from None


def _events(reply: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    for line in reply:
        text = line.decode().strip()
        if text.startswith("data:") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data:"))


def _steps(url: str) -> tuple[int, int]:
    """Steps on T5 and on the fallback, from the metrics page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        families = {family.name: family for family in text_string_to_metric_families(reply.read().decode())}

    def total(name: str) -> int:
        return int(sum(sample.value for sample in families[name].samples if sample.name == f"{name}_total"))

    return total("mjolnir_t5_steps"), total("mjolnir_fallback_steps")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "appliance.cli", "serve", *flags]


def _tell(line: str) -> None:
    sys.stderr.write(f"demo: {line}\n")
    sys.stderr.flush()


def run(arguments: Sequence[str] | None = None) -> int:
    """Command line; see ``--help``. The exit code is 0 only if everything went well."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Serve a small real model on this machine.")
    parser.add_argument("--once", metavar="QUESTION", help="ask one question, print the answer, stop")
    parser.add_argument("--json", action="store_true", help="with --once: one JSON line last")
    parser.add_argument("--port", type=int, help="port to listen on (8000; with --once any free one)")
    options = parser.parse_args(arguments)
    if options.json and options.once is None:
        parser.error("--json needs --once")
    model = demo_model.prepare(_tell)
    flags = ["--model", str(model), "--offline"]
    if options.once is None:
        given = ["--port", str(options.port)] if options.port else []
        command = _serve_command(*flags, *given, *SERVE_FLAGS)
        os.execv(command[0], command)  # noqa: S606  (the shell has done its part)
    port = options.port or _free_port()
    outcome = ask_once(options.once, _serve_command(*flags, "--port", str(port), *SERVE_FLAGS), port)
    if options.json:
        sys.stdout.write(json.dumps(asdict(outcome), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(
            f"{outcome.answer}\n\n{outcome.t5_steps} steps on T5, {outcome.fallback_steps} on the fallback, "
            f"{outcome.tokens_per_s} tokens/s, ready after {outcome.start_seconds} s\n"
        )
    return 0


def main() -> None:
    """Entry point: an error of the appliance's own becomes one line and its exit code."""
    try:
        sys.exit(run())
    except ApplianceError as error:
        sys.stderr.write(f"demo: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
