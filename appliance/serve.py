"""`mjolnir serve`: the supervisor, the HTTP server and the terminal, put together and taken apart again."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop

from appliance import preflight
from appliance.access_log import AccessLog
from appliance.app import Appliance, Reporter, build_api
from appliance.board import BoardSampler
from appliance.board.nvml import Nvml
from appliance.board_metrics import register_board
from appliance.calibrate import calibrate_first
from appliance.command import served_name
from appliance.errors import ApplianceError, SettingsError, StoppedError
from appliance.keys import build_gate
from appliance.log import Redactor, logging_to, secrets_of
from appliance.metrics import Metrics
from appliance.processes import become_subreaper
from appliance.profiles.fit import warnings as profile_warnings
from appliance.profiles.routes import profiles_router
from appliance.protocol import BoundedProtocol
from appliance.proxy import Proxy
from appliance.pulse import Pulse
from appliance.queueing import AdmissionQueue, Limits
from appliance.restore import restore_router
from appliance.settings import Settings, engine_environment
from appliance.supervisor import Supervisor
from appliance.tally import Tally, remove_leftovers
from appliance.terminal import Terminal
from appliance.watcher import Watcher

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5  # for responses that are being written when everything else has ended


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM is for the supervisor, which drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: Settings) -> None:
    """Run the appliance until a signal ends it.

    Raises:
        ApplianceError: it can't be started, or the engine can't be kept up.
    """
    environment = engine_environment()
    redactor = Redactor(secrets_of(settings.engine_args, {**environment, "OTLP": settings.otlp_endpoint}))
    terminal = Terminal(settings.log_level, settings.log_format)
    with logging_to(terminal.log_handler(), settings.log_level, redactor), terminal, _last_word(settings, redactor):
        for line in profile_warnings(settings, environment):
            log.warning("%s", line)
        preflight.check_settings(settings)
        if settings.calibrate:
            listen(settings.host, settings.port).close()  # a port that is taken should show now, not in minutes
            try:
                calibrate_first(settings, environment)
            except StoppedError as stopped:  # as any stop: nothing went wrong
                log.info("%s", stopped)
                return
        with listen(settings.host, settings.port) as listener:
            uvloop.run(_run(settings, environment, redactor, listener, terminal))


@contextlib.contextmanager
def _last_word(settings: Settings, redactor: Redactor) -> Iterator[None]:
    """Where the log is JSON, what ends the appliance is a message too; else the command line prints it."""
    try:
        yield
    except ApplianceError as error:
        if settings.log_format != "json":
            error.args = (redactor(str(error)),)
            raise
        log.critical("%s", error, extra={"exit_code": error.exit_code})
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        if settings.log_format != "json":
            raise
        log.critical("%r", error, exc_info=True)
        raise SystemExit(1) from None


class Stack:
    """Supervisor, metrics, proxy and HTTP server of one appliance, connected with each other."""

    def __init__(
        self,
        settings: Settings,
        environment: dict[str, str],
        listener: socket.socket,
        watchers: Sequence[Watcher] = (),
        redactor: Redactor | None = None,
    ) -> None:
        self.url = _url(listener)
        redactor = redactor or Redactor()
        self._gate = build_gate(
            settings.api_keys_file,
            settings.admin_keys_file,
            listener.getsockname()[0],
            allow_anonymous=settings.allow_anonymous,
            learn=redactor.add,
        )
        self.metrics = Metrics(Tally(Supervisor.stats_dir_of(settings)))
        self.supervisor = Supervisor(settings, environment, [self.metrics, *watchers], redactor)
        reporter = Reporter(self.supervisor, self.metrics, self.url)
        limits = Limits(settings.max_in_flight, settings.max_queue, settings.queue_seconds, settings.hold_seconds)
        queue = AdmissionQueue(self.supervisor, self.metrics, limits)
        self.supervisor.tell(queue)
        access = AccessLog(on=settings.access_log)
        proxy = Proxy(self.supervisor, queue, self._gate, self.metrics, settings.max_body_mib << 20, access)
        self._board = BoardSampler.of("/", Nvml())
        register_board(self.metrics.registry, self._board)
        self._pulse = Pulse(
            lambda lines: reporter.report(lines).model_dump(mode="json"), self._board, self.supervisor.session_if_ready
        )
        reporter.share = lambda: self._pulse.verdict
        reporter.waiting = lambda: queue.depth
        self.supervisor.tell(self._pulse)
        api = build_api(self.supervisor, self.metrics, reporter, self._pulse)
        api.include_router(profiles_router(self.supervisor, settings))
        api.include_router(restore_router(self.supervisor, guarded=settings.admin_keys_file is not None))
        self._server = _Server(_config(Appliance(api, proxy, self._gate, self.metrics)))
        self._listener = listener

    async def run(self) -> None:
        """Serve until the supervisor has ended; answers that are being written may end too.

        Raises:
            ApplianceError: the engine can't be started, or not be kept up.
        """
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")
        beside = [
            asyncio.create_task(self._gate.watch(), name="keys"),
            asyncio.create_task(self._pulse.run(), name="status page"),
        ]
        with self._board:
            try:
                await self.supervisor.run()
            finally:
                # First what feeds the status page: its open streams would hold up the server's end.
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                self._server.should_exit = True
                await serving


async def _run(
    settings: Settings,
    environment: dict[str, str],
    redactor: Redactor,
    listener: socket.socket,
    terminal: Terminal,
) -> None:
    become_subreaper()
    remove_leftovers(settings.stats_dir)
    stack = Stack(settings, environment, listener, [terminal], redactor)
    terminal.introduce(stack.url, served_name(settings))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stack.supervisor.stop)
    # What the imports left is no garbage; to go through it again stops every stream for 30 ms.
    gc.collect()
    gc.freeze()
    await stack.run()


def _config(app: Appliance) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def listen(host: str, port: int) -> socket.socket:
    """Take the port now: a port that is only looked at may be another's by the time it is needed.

    Raises:
        SettingsError: the address can't be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise SettingsError(f"host={host!r}: {error.strerror}; accepted: an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise SettingsError(f"port={port}: {error.strerror} on {host}; accepted: a free port (--port)") from None
    return listener


def _url(listener: socket.socket) -> str:
    """Address under which this machine reaches the appliance."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (for display)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
