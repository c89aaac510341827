"""What `mjolnir status` knows: the appliance's own report over HTTP, and its container where a daemon answers."""

import json
import urllib.error
import urllib.request
from dataclasses import asdict
from typing import Any

from appliance.errors import ApplianceError, EngineError
from appliance.host.adminkey import VARIABLE
from appliance.host.facts import Container, Daemon
from appliance.host.readiness import words_of

DEFAULT_URL = "http://127.0.0.1:8000"
_SECONDS = 5.0


def container_of(daemon: Daemon, name: str) -> Container | None:
    """The appliance's container, whoever made it; a running one rather than a stopped one."""
    own = daemon.find(name)
    found = [*([own] if own else []), *daemon.composed()]
    return next((container for container in found if container.running), found[0] if found else None)


def look(name: str) -> Container | None:
    """The container on this machine's daemon; None where there is no daemon or no container."""
    from appliance.host.daemon import DockerDaemon  # noqa: PLC0415

    try:
        return container_of(DockerDaemon(_SECONDS), name)
    except ApplianceError:
        return None


def report(url: str, container: Container | None, key: str = "") -> dict[str, Any]:
    """The appliance's report, with ``container`` added.

    Args:
        url: the appliance; empty means its container's address.
        container: the appliance's container, if this machine has one.
        key: an admin key, for an appliance that asks for one.

    Raises:
        EngineError: no appliance answers; says so of its container too.
    """
    if not url and container is not None and container.address is not None:
        url = "http://{}:{}".format(*container.address)
    try:
        answer = fetch(f"{(url or DEFAULT_URL).rstrip('/')}/status", key)
    except EngineError as error:
        if container is None:
            raise
        raise EngineError(f"{error}; container {container.name} is {container.state}: `mjolnir logs`") from None
    return answer | {"container": asdict(container) if container else None}


def fetch(url: str, key: str = "") -> dict[str, Any]:
    """A JSON object from a URL.

    Raises:
        EngineError: nothing answers there, or something else does, or it wants another key.
    """
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{url}: not an address; accepted: http://HOST:PORT")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310  (checked above)
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise EngineError(
                f"{url} wants {'another' if key else 'an'} admin key: --admin-key-file or {VARIABLE}"
            ) from None
        raise EngineError(f"{url} answers {error.code}") from None
    except (urllib.error.URLError, OSError) as error:
        raise EngineError(f"no appliance answers at {url}: {getattr(error, 'reason', error)}") from None
    except (ValueError, TypeError):
        raise EngineError(f"what answers at {url} is no appliance") from None


def rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The report as a person reads it."""
    fault, counters = answer["last_fault"], answer["counters"]
    t5 = sum(number for name, number in counters.items() if name.startswith("t5:"))
    fallback = sum(number for name, number in counters.items() if name.startswith("fallback:"))
    found = [
        ("state", words_of(answer)),
        ("model", answer["model"]),
        ("url", answer["url"]),
        ("uptime", f"{answer['uptime_seconds']:.0f} s"),
        ("restarts", str(answer["restarts"])),
        ("steps on T5", f"{t5} of {t5 + fallback}"),
    ]
    if fault:
        found.append(("last fault", f"{fault['cause']}: {fault['text']}"))
    if container := answer.get("container"):
        project = container["labels"].get("com.docker.compose.project")
        owner = f", compose project {project}" if project else ""
        found.append(("container", f"{container['name']} ({container['state']}{owner})"))
    return found
