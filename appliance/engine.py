"""The engine as a child process: start it, read its log, end it and everything that it started."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable

from appliance.command import Launch
from appliance.engine_log import EngineLog
from appliance.errors import EngineError
from appliance.processes import descendants, end, has_variable
from appliance.waiting import first_of
from mjolnir.names import STATS_DIR_VARIABLE

log = logging.getLogger(__name__)

_CHUNK_BYTES = 65536
_PACE_SECONDS = 0.001  # between two reads of a flood, which so gets at most 64 MiB/s
_KEEPER_MARGIN_SECONDS = 10.0  # what the keeper needs beyond the engine's own grace (see keeper, processes)


class Engine:
    """One run of the engine, from start to the end of its last process.

    The engine runs under ``appliance.keeper`` in a session of its own: a Ctrl-C on our terminal does not reach it,
    and nothing that it starts can outlive us.

    Args:
        launch: command line and environment.
        stop_seconds: how long it may take to end after SIGTERM.
        on_line: is given the lines of its log, cleaned; in a flood not all of them.
        redact: masks secrets in a line before anybody sees it.
    """

    def __init__(
        self,
        launch: Launch,
        stop_seconds: float,
        on_line: Callable[[str], None],
        redact: Callable[[str], str] = str,
    ) -> None:
        self._launch = launch
        self._stop_seconds = stop_seconds
        self._log = EngineLog(redact, on_line)
        self._keeper: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Task[int] | None = None

    async def start(self) -> None:
        """Start the processes.

        Raises:
            EngineError: no process could be started.
        """
        self._launch.socket.unlink(missing_ok=True)  # bind() does not replace a socket that a dead engine left
        command = (sys.executable, "-m", "appliance.keeper", str(self._stop_seconds), *self._launch.command)
        try:
            self._keeper = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._launch.environment,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"the engine can't be started: {error}") from error
        self._exit = asyncio.create_task(self._watch(self._keeper), name="engine")

    @property
    def pid(self) -> int:
        """Process id of the keeper, the root of the engine's processes."""
        return self._running().pid

    def tail(self, lines: int = 100) -> list[str]:
        """The last lines of the engine's log that were shown."""
        return self._log.tail(lines)

    def log_since(self, seconds: float) -> list[str]:
        """All of the log's lines of the last seconds, as far as they are kept."""
        return self._log.since(time.monotonic() - seconds)

    async def wait(self) -> int:
        """Wait until every process of the engine has ended and its log is read.

        Returns:
            The exit code of its main process, 128 + signal when it was killed.
        """
        if self._exit is None:
            raise EngineError("the engine was never started")
        return await asyncio.shield(self._exit)

    async def stop(self, hurry: asyncio.Event | None = None) -> int:
        """End the engine: SIGTERM, time to finish, SIGKILL; returns once nothing of it is left.

        Args:
            hurry: once it is set, the engine gets no more time.
        """
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_seconds + _KEEPER_MARGIN_SECONDS):
                if hurry is not None:
                    await first_of(self.wait(), hurry.wait())
                    if hurry.is_set():
                        self.kill()
                return await self.wait()
        except TimeoutError:
            log.error("the engine's keeper does not answer; killing its processes")
            self._signal(signal.SIGKILL)
            return await self.wait()

    def kill(self) -> None:
        """End the engine without giving it time; ``wait`` or ``stop`` then tells when it is gone."""
        self._signal(signal.SIGINT)

    async def _watch(self, keeper: asyncio.subprocess.Process) -> int:
        reader = asyncio.create_task(self._read(keeper), name="engine-log")
        await ended(keeper.pid)
        # A keeper that was itself killed has left its processes to us, see become_subreaper.
        await asyncio.to_thread(end, self._strays, 0.0)
        # Nobody holds the log's other end any more, unless a process is stuck in the kernel.
        await asyncio.wait({reader}, timeout=2.0)
        reader.cancel()
        if keeper.stdin is not None:
            keeper.stdin.close()
        code = await keeper.wait()
        return code if code >= 0 else 128 - code

    async def _read(self, keeper: asyncio.subprocess.Process) -> None:
        if keeper.stdout is None:
            return
        try:
            while data := await self._read_some(keeper.stdout):
                flood = self._log.feed(data, time.monotonic())
                for _ in self._log.steps():
                    await asyncio.sleep(0)  # a flood in the log must not hold up requests
                await asyncio.sleep(_PACE_SECONDS if flood else 0)
        finally:
            self._log.close()

    async def _read_some(self, pipe: asyncio.StreamReader) -> bytes:
        while True:
            try:
                async with asyncio.timeout(self._log.patience):
                    return await pipe.read(_CHUNK_BYTES)
            except TimeoutError:
                self._log.idle(time.monotonic())

    def _strays(self) -> list[int]:
        mark = f"{STATS_DIR_VARIABLE}={self._launch.environment.get(STATS_DIR_VARIABLE)}"
        return [pid for pid in descendants(os.getpid()) if has_variable(pid, mark)]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._running().send_signal(number)

    def _running(self) -> asyncio.subprocess.Process:
        if self._keeper is None:
            raise EngineError("the engine was never started")
        return self._keeper


async def ended(pid: int) -> None:
    """Wait until a process has ended.

    ``Process.wait`` also waits for the pipes, which an orphan of the process may hold open for ever.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
