"""`mjolnir`, killed by SIGKILL before or after the Nth effect on Docker: ``killed_at.py N before|after ARGUMENTS``."""

import os
import signal
import sys
from collections.abc import Callable

from appliance import cli
from appliance.host.daemon import DockerDaemon

EFFECTS = ("create", "start", "stop", "rename", "remove")


def deadly(method: Callable, number: int, when: str, count: list[int]) -> Callable:
    def call(*arguments: object) -> object:
        mine = count[0]
        count[0] += 1
        if (mine, when) == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = method(*arguments)
        if (mine, when) == (number, "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return call


if __name__ == "__main__":
    count = [0]
    for effect in EFFECTS:
        setattr(DockerDaemon, effect, deadly(getattr(DockerDaemon, effect), int(sys.argv[1]), sys.argv[2], count))
    sys.argv = ["mjolnir", *sys.argv[3:]]
    cli.main()
