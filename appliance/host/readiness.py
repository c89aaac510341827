"""Waits until a container's appliance takes requests, watching the container as well as its port."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.host.errors import UpgradeError
from appliance.host.facts import Container, Daemon, Say

PROBE_SECONDS = 5.0
INTERVAL_SECONDS = 1.0
# The daemon starts a container again that has ended. Twice may be an accident; three times is what it does.
RESTART_LIMIT = 3


@dataclass(frozen=True)
class Answer:
    """What the appliance said: whether it takes requests, and what it is doing, in words."""

    ready: bool
    words: str = ""


Probe = Callable[[str, int], Answer]


def ask(host: str, port: int) -> Answer:
    """One question to ``/health/ready``, and to ``/status`` while the answer is no."""
    base = f"http://{host}:{port}"
    try:
        with urllib.request.urlopen(f"{base}/health/ready", timeout=PROBE_SECONDS) as answer:  # noqa: S310
            return Answer(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return Answer(False, "not listening yet")
    except ValueError:
        return Answer(False, "speaks no HTTP")
    try:
        with urllib.request.urlopen(f"{base}/status", timeout=PROBE_SECONDS) as answer:  # noqa: S310
            return Answer(False, words_of(json.load(answer)))
    except (OSError, ValueError, TypeError):
        return Answer(False)


def words_of(report: dict[str, Any]) -> str:
    """State, phase and percentage of a status report."""
    words = str(report.get("state", ""))
    if progress := report.get("progress"):
        percent = "" if progress.get("percent") is None else f" {progress['percent']}%"
        words += f" ({progress.get('phase', '')}{percent})"
    return words


@dataclass(frozen=True)
class Waiter:
    """Patience with a start.

    Attributes:
        deadline_seconds: longest time until ready. A cold start on Thor may compile for 45 minutes.
        probe: asks the appliance.
        sleep, clock: of the time module, for tests.
    """

    deadline_seconds: float
    probe: Probe = ask
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def wait(self, daemon: Daemon, container: str, say: Say) -> None:
        """Return once the appliance is ready.

        Raises:
            UpgradeError: it ended, keeps ending, or is not ready in time.
            DaemonError: the daemon can't be asked.
        """
        end = self.clock() + self.deadline_seconds
        words = ""
        while True:
            facts = daemon.find(container)
            _raise_if_lost(facts)
            if facts is not None and facts.address is not None and facts.state == "running":
                answer = self.probe(*facts.address)
                if answer.ready:
                    return
                words = answer.words
            if self.clock() >= end:
                raise UpgradeError(f"not ready within {self.deadline_seconds:.0f} s{words and ': ' + words}")
            say(words)
            self.sleep(INTERVAL_SECONDS)


def _raise_if_lost(facts: Container | None) -> None:
    if facts is None:
        raise UpgradeError("its container is gone")
    if facts.state in ("exited", "dead"):
        raise UpgradeError(f"its container ended with exit code {facts.exit_code}")
    if facts.restarts >= RESTART_LIMIT:
        raise UpgradeError(f"its container ended {facts.restarts} times, last with exit code {facts.exit_code}")
    if facts.address is None:
        raise UpgradeError("its port is not published")
