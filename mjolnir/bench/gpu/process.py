"""The parent's side of an engine process: start it, ask it, and end it whatever state it is in."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_SECONDS = 240
ANSWER_SECONDS = 150
_FIRST_ERROR = re.compile(
    r"^(?:\(\w+[^)]*\) )?(?:\w+ \d\d-\d\d [\d:]+ \[[^\]]*\] )?(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$"
)


class EngineFailedError(Exception):
    """An engine did not start, died, hung or refused; the message has the first root cause."""


class EngineProcess:
    """A process that runs `mjolnir.bench.gpu.child`, or another command that speaks as it does.

    Attributes:
        name: for messages.
        log: everything that it printed.
    """

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        environment: dict[str, str],
        log: Path,
        command: tuple[str, ...] = (sys.executable, "-m", "mjolnir.bench.gpu.child"),
    ) -> None:
        """Start; `wait_until_started` waits."""
        self.name = name
        self.log = log
        self._pending = b""
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._write(arguments)

    def wait_until_started(self, seconds: float = START_SECONDS) -> None:
        """Wait for the engine.

        Raises:
            EngineFailedError: it does not start.
        """
        self._answer(seconds)

    def ask(self, do: str, seconds: float = ANSWER_SECONDS, **request: Any) -> Any:
        """Have the engine do something, and wait for the answer.

        Raises:
            EngineFailedError: there is none.
        """
        self._write({"do": do, **request})
        return self._answer(seconds)

    def stop(self) -> None:
        """End the process and all that it started."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _write(self, document: dict[str, Any]) -> None:
        if self._process.stdin is None:
            raise EngineFailedError(f"{self.name}: has no input")
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailedError(f"{self.name}: died: {root_cause(self.log)}") from None

    def _answer(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        stream = self._process.stdout
        if stream is None:
            raise EngineFailedError(f"{self.name}: has no output")
        while b"\n" not in self._pending:
            ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise EngineFailedError(f"{self.name}: no answer within {seconds:.0f} s: {root_cause(self.log)}")
            part = os.read(stream.fileno(), 1 << 20)
            if not part:
                raise EngineFailedError(f"{self.name}: died: {root_cause(self.log)}")
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        document = json.loads(line)
        if "error" in document:
            raise EngineFailedError(f"{self.name}: {document['error']}")
        return document["ok"]


def root_cause(log: Path) -> str:
    """The first exception of a log, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    for line in lines:
        match = _FIRST_ERROR.match(line)
        if match:
            return match.group(1)[:600]
    return next((line[:600] for line in reversed(lines) if line), "it printed nothing")
