"""A stand-in for `vllm serve`: the same socket, routes and log shapes, and every fault on demand.

What the process does is set by flags, what one request does by the ``script`` in its body. Events are sent as
datagrams to ``--events``, so that a test waits for them instead of sleeping.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

from aiohttp import web

from mjolnir.counters import CounterFile, GroupInfo
from mjolnir.names import FallbackReason, KernelSource, StepKind

WARM_UP_STEPS = 7
GROUP = GroupInfo("layers.0", "fp8", 64, 16, "TORCH_REF")
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="fake"} 1.0
# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 3.0
vllm:iteration_tokens_total_count{engine="0"} 3.0
vllm:iteration_tokens_total_sum{engine="0"} 3.0
# HELP process_open_fds Number of open file descriptors.
# TYPE process_open_fds gauge
process_open_fds 39.0
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3"} 1.0
# HELP vllm:e2e_request_latency_seconds Histogram of e2e request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:e2e_request_latency_seconds_count{engine="0"} 2.0
vllm:e2e_request_latency_seconds_sum{engine="0"} 1.5e-03
"""
FAILED_START = """\
(Worker pid=11) ERROR 12-01 04:06:58 [executor.py:9] WorkerProc failed to start.
(Worker pid=11) ERROR 12-01 04:06:58 [executor.py:9] Traceback (most recent call last):
(Worker pid=11) ERROR 12-01 04:06:58 [executor.py:9]   File "worker.py", line 1, in init
(Worker pid=11) ERROR 12-01 04:06:58 [executor.py:9]     raise {error}
(Worker pid=11) ERROR 12-01 04:06:58 [executor.py:9] {error}
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10)   File "utils.py", line 2, in wait
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


class FakeEngine:
    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.running = 0
        self.steps = 0
        self.counters = CounterFile(os.environ["MJOLNIR_STATS_DIR"])
        self.counters.set_groups([GROUP])
        self.counters.kernels(KernelSource.COMPILED, 3)
        for _ in range(WARM_UP_STEPS):
            self.counters.t5_step(StepKind.DECODE, 1)

    def tell(self, event: str, **details: object) -> None:
        if self.flags.events:
            # A test that has ended listens no more.
            with contextlib.suppress(OSError):
                self.events.sendto(json.dumps({"event": event, **details}).encode(), self.flags.events)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/version", self.version)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.scripted)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/tokenize", self.echo)
        app.router.add_post("/detokenize", self.die)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.flags.never_ready else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        page = self.flags.metrics_page or METRICS
        page = page.replace('model_name="fake"} 1.0', f'model_name="fake"}} {self.running}.0')
        page = re.sub(r"(?m)^(vllm:iteration_tokens_total_.*) 3\.0$", rf"\g<1> {self.steps}.0", page)
        return web.Response(text=page)

    async def models(self, request: web.Request) -> web.Response:
        answer = {"version": "fake", "path": request.raw_path, "pid": os.getpid(), "data": [{"id": "fake"}]}
        return web.json_response(answer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The self-test's question and the watchdog's probe are answered as vLLM would; all else by its script."""
        body = await request.json()
        if "messages" not in body or "script" in body:
            return await self.scripted(request)
        if body["max_tokens"] == 1:  # each event that nobody reads takes one of the few places of the socket
            self.tell("probe")
        if self.flags.fail_self_test and not self.given_up():
            return web.json_response({"error": {"message": "EngineCore failed: nan"}}, status=500)
        if self.flags.deaf:
            await asyncio.Event().wait()
        for _ in range(body["max_tokens"]):
            self.counters.t5_step(StepKind.DECODE, 1)
            self.steps += 1
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "Paris"}}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": body["max_tokens"]}})

    def given_up(self) -> bool:
        """Whether the ladder's rung that heals this engine is reached."""
        return {
            "t5_off": os.environ.get("MJOLNIR_ATTN_DISABLE") == "1",
            "eager": "--enforce-eager" in sys.argv,
        }.get(self.flags.healed_by, False)

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "fake", "path": request.raw_path, "pid": os.getpid()})

    async def echo(self, request: web.Request) -> web.Response:
        """What arrived: headers as they were, and the length and text of the body."""
        body = await request.read()
        headers = [[n.decode("latin-1").lower(), v.decode("latin-1")] for n, v in request.raw_headers]
        extra = [
            ("Connection", "x-hop"),
            ("X-Hop", "1"),
            ("X-Kept", "yes"),
            ("X-Request-Id", "engine"),
            ("Server", "f"),
        ]
        answer = {"headers": headers, "bytes": len(body), "path": request.raw_path}
        return web.json_response(answer, headers=extra)

    async def die(self, request: web.Request) -> web.Response:
        os._exit((await request.json()).get("code", 0))

    async def scripted(self, request: web.Request) -> web.StreamResponse:
        """Answer as the request's script says.

        Keys: ``status``, ``type``, ``chunks`` (text), ``repeat`` (all of them so often), ``gap`` (seconds), ``hang``
        (stay silent after the chunks),
        ``die`` (exit after the chunks), ``hang_first`` (stay silent before the headers), ``unseen`` (not in the
        number of running requests).
        """
        script = (await request.json()).get("script", {})
        self.counters.t5_step(StepKind.DECODE, 1)
        self.counters.fallback_step(FallbackReason.PREFILL, 5)
        self.tell("request")
        self.steps += 1
        self.running += not script.get("unseen")
        try:
            return await self._play(request, script)
        except asyncio.CancelledError:
            self.tell("cancelled")
            raise
        finally:
            self.running -= not script.get("unseen")

    async def _play(self, request: web.Request, script: dict) -> web.StreamResponse:
        if script.get("hang_first"):
            await asyncio.Event().wait()
        if script.get("die_first"):
            os._exit(0)
        response = web.StreamResponse(status=script.get("status", 200))
        response.content_type = script.get("type", "text/event-stream")
        if "length" in script:
            response.content_length = script["length"]
        await response.prepare(request)
        for chunk in script.get("chunks", ["data: {}\n\n", "data: [DONE]\n\n"]) * script.get("repeat", 1):
            await response.write(chunk.encode())
            await asyncio.sleep(script.get("gap", 0))
        if script.get("die"):
            os._exit(0)
        if script.get("hang"):
            await asyncio.Event().wait()
        await response.write_eof()
        return response


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds")
    parser.add_argument("--events")
    parser.add_argument("--fail-start", metavar="ERROR")
    parser.add_argument("--fail-once", metavar="FILE", help="--fail-start only if FILE exists; it is removed")
    parser.add_argument("--exit-code", type=int, default=1)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--repeat-line", help="say this for ever with a new time stamp, instead of being silent")
    parser.add_argument("--ignore-sigterm", type=int, default=0, help="how many to ignore; -1: all")
    parser.add_argument("--setsid-child", action="store_true")
    parser.add_argument("--flood", type=int, default=0, help="bytes of log in lines without end")
    parser.add_argument("--metrics-page")
    parser.add_argument("--secret")
    parser.add_argument("--healed-by", metavar="RUNG", help="--fail-start and --fail-self-test only above this rung")
    parser.add_argument("--healed-without", metavar="FILE", help="--fail-start only while FILE exists")
    parser.add_argument("--fail-self-test", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="answers no self-test")
    parser.add_argument("--compiler", metavar="FILE", help="a child that runs FILE as a compiler")
    parser.add_argument("--core", action="store_true", help="a child with an engine core's title")
    return parser.parse_known_args()[0]


def fails(flags: argparse.Namespace) -> bool:
    """Whether this start is one of those that fail."""
    if flags.healed_by and FakeEngine.given_up(argparse.Namespace(flags=flags)):
        return False
    needed = [file for file in (flags.fail_once, flags.healed_without) if file]
    return all(map(os.path.exists, needed))


def before_ready(flags: argparse.Namespace) -> None:
    say("(APIServer pid=10) INFO 12-01 04:06:38 [model.py:733] Resolved architecture: FakeForCausalLM")
    if flags.secret:
        say(f"(APIServer pid=10) INFO 12-01 04:06:38 [api.py:1] non-default args: api_key={flags.secret}")
    if flags.fail_start and fails(flags):
        if flags.fail_once:
            os.unlink(flags.fail_once)
        say(FAILED_START.format(error=flags.fail_start).rstrip())
        sys.exit(flags.exit_code)
    if flags.flood:
        sys.stderr.write("x" * flags.flood)
        sys.stderr.flush()
        say("")
    sys.stderr.write("\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00]")
    sys.stderr.write("\rLoading safetensors checkpoint shards: 100% Completed | 2/2 [00:00<00:00]\n")
    say(
        "(EngineCore pid=11) INFO 12-01 04:06:58 [core.py:9] init engine (profile, create kv cache, "
        "warmup model) took 0.1 s"
    )


def spawn_orphan() -> int:
    """A process in a session of its own, deaf to SIGTERM: like an engine core that outlives its parent."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    return child.pid


def spawn_compiler(program: str) -> int:
    return subprocess.Popen([program, "600"], start_new_session=True).pid


def spawn_core() -> int:
    """A process with the title that vLLM gives its engine core."""
    code = "import time; print(flush=True); time.sleep(600)"
    child = subprocess.Popen(
        ["VLLM::EngineCore", "-c", code],  # noqa: S607  (a title)
        executable=sys.executable,
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    return child.pid


async def serve(flags: argparse.Namespace) -> None:
    engine = FakeEngine(flags)
    stop = asyncio.Event()
    ignored = flags.ignore_sigterm

    def on_sigterm() -> None:
        nonlocal ignored
        engine.tell("sigterm")
        if ignored == 0:
            stop.set()
        ignored -= ignored > 0

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    if flags.setsid_child:
        engine.tell("child", pid=spawn_orphan())
    if flags.compiler:
        engine.tell("compiler", pid=spawn_compiler(flags.compiler))
    if flags.core:
        engine.tell("core", pid=spawn_core())
    runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, flags.uds).start()
    engine.tell("serving", pid=os.getpid())
    while flags.repeat_line and not stop.is_set():
        say(f"{flags.repeat_line} {time.time()}")
        await asyncio.sleep(0.05)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    FLAGS = parse()
    before_ready(FLAGS)
    asyncio.run(serve(FLAGS))
