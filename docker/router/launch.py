"""Start vllm-router in front of the boards that a file lists; further arguments are the router's own flags.

The file has Prometheus' file_sd form, so that the router and the fleet's Prometheus read one list:
``[{"targets": ["thor-1:8000", "thor-2:8000"]}]``.
"""

import json
import os
import re
import sys
from pathlib import Path

FLEET_FILE = "/etc/fleet/appliances.json"
_TARGET = re.compile(r"[A-Za-z0-9_.\-]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}")


class FleetError(Exception):
    """A list that can't be used; one line for the user."""


def worker_urls(path: str) -> list[str]:
    """URLs of the boards of a list, in its order.

    Raises:
        FleetError: no such file, not of the form above, no board, or one twice.
    """
    try:
        groups = json.loads(Path(path).read_text())
        targets = [str(target) for group in groups for target in group["targets"]]
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}; FLEET_DIR in .env is the folder of the list") from None
    except (ValueError, TypeError, KeyError):
        raise FleetError(f'{path}: accepted: [{{"targets": ["host:port", ...]}}]') from None
    for target in targets:
        if not _TARGET.fullmatch(target):
            raise FleetError(f"{path}: {target!r}: accepted: host:port, without a scheme")
    if not targets or len(set(targets)) < len(targets):
        raise FleetError(f"{path}: accepted: one board or more, each once; found {targets}")
    return [f"http://{target}" for target in targets]


def main() -> None:
    """Become the router."""
    try:
        urls = worker_urls(os.environ.get("FLEET_FILE", FLEET_FILE))
    except FleetError as error:
        sys.exit(f"router: {error}")
    command = ["vllm-router", *sys.argv[1:], "--worker-urls", *urls]
    os.execvp(command[0], command)  # noqa: S606  (the image's own program, no shell)


if __name__ == "__main__":
    main()
