"""The process between the supervisor and the engine: it outlives either, and nothing outlives it.

The supervisor starts it as ``python -m appliance.keeper GRACE COMMAND…`` and holds the other end of its standard
input. The keeper starts the engine, inherits whatever the engine's processes orphan, and ends when all of them
are gone, with the engine's exit code. Four things make it end them:

- the engine's main process has ended, whatever its reason;
- SIGTERM: passed on to the main process, which gets GRACE seconds to end by itself. It is repeated, because
  vLLM loses one that arrives while it brings up its HTTP server;
- SIGINT: all of them are killed at once;
- end of file on standard input: the supervisor is gone, by SIGKILL or otherwise.

The engine's log does not pass through here: the engine has the supervisor's pipe itself, so what it wrote last is in
the kernel's hands whatever becomes of us. The keeper makes that pipe as large as it may be, which lets the engine go
on while the supervisor is busy.

Standard library only, so that it costs milliseconds and a few megabytes.
"""

import contextlib
import fcntl
import os
import select
import signal
import sys
import time

from appliance.processes import become_subreaper, die_with_parent, end_descendants

_ORPHAN_GRACE_SECONDS = 2.0  # for the rest of the engine once its main process has ended
_REPEAT_SECONDS = 2.0
_SUPERVISOR = 0  # file descriptor: our end of the supervisor's pipe
_LOG = 2
_LOG_PIPE_BYTES = 1 << 20  # what Linux allows everyone; 64 KiB unless asked for
_WORD_SECONDS = 2.0  # longest wait for room in the log


def main() -> int:
    """Run the command and return its exit code, 128 + signal when it was killed."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    become_subreaper()
    with contextlib.suppress(OSError):  # no pipe, or no right to a larger one
        fcntl.fcntl(_LOG, fcntl.F_SETPIPE_SZ, _LOG_PIPE_BYTES)
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    engine = _start(command)
    code, hurry = _watch(engine, grace, waker)
    stuck = end_descendants(os.getpid(), 0.0 if hurry else _ORPHAN_GRACE_SECONDS)
    _poll(0)  # what ended by itself and was inherited
    if stuck:
        _say(f"processes that SIGKILL does not end: {stuck}")
    return code


def _start(command: list[str]) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL, keeper)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, _SUPERVISOR)
        os.execvp(command[0], command)  # noqa: S606  (a list, no shell)
    except OSError as error:
        _say(f"{command[0]}: {error.strerror}")
    os._exit(127)


def _watch(engine: int, grace: float, waker: int) -> tuple[int, bool]:
    """Wait for the engine's main process, ending it when told to; its exit code, and whether it was killed."""
    deadline: float | None = None
    killed = False
    watched = [waker, _SUPERVISOR]
    while True:
        pid, status = _poll(engine)
        if pid == engine:
            return _exit_code(status), killed
        timeout = None
        if deadline is not None and not killed:
            timeout = min(_REPEAT_SECONDS, max(0.0, deadline - time.monotonic()))
        readable, _, _ = select.select(watched, [], [], timeout)
        numbers = os.read(waker, 64) if waker in readable else b""
        stop = signal.SIGTERM in numbers
        if _SUPERVISOR in readable and not os.read(_SUPERVISOR, 64):
            watched.remove(_SUPERVISOR)
            stop = True
        if stop and deadline is None:
            deadline = time.monotonic() + grace
        killed = killed or signal.SIGINT in numbers or (deadline is not None and time.monotonic() >= deadline)
        if killed:
            os.kill(engine, signal.SIGKILL)
        elif deadline is not None and (stop or not readable):
            os.kill(engine, signal.SIGTERM)


def _poll(engine: int) -> tuple[int, int]:
    """Reap every child that has ended, the inherited ones too; the engine's status when it is among them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in (0, engine):
                return pid, status
    return 0, 0


def _say(words: str) -> None:
    """Write a line to the log, unless nobody reads it: the keeper has to end all the same."""
    with contextlib.suppress(OSError):
        if select.select([], [_LOG], [], _WORD_SECONDS)[1]:
            os.write(_LOG, words.encode()[: select.PIPE_BUF - 1] + b"\n")


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
