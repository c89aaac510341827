"""Fixtures with the real thing: the appliance over real vLLM on the CPU."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from appliance import demo_model as demo
from tests.engine.harness import STOP_SECONDS, Appliance


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's model, prepared if it is not yet."""
    return demo.prepare(print)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Appliance]]:
    """Start appliances: ``with serve(model, *flags) as appliance``; each is stopped and checked for leftovers."""

    @contextmanager
    def start(model: Path, *flags: str) -> Iterator[Appliance]:
        folder = tmp_path_factory.mktemp("appliance")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "appliance.cli", "serve", "--model", str(model), "--port", str(port)]
        command += ["--stats-dir", str(folder / "stats"), *flags]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        appliance = Appliance(process, port, folder / "log")
        try:
            appliance.wait_until_ready()
            yield appliance
            family = appliance.engine_processes()
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_SECONDS) == 0, appliance.log[-3000:]
            _, alive = psutil.wait_procs(family, timeout=0)
            assert not alive, f"left behind: {alive}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    return start
