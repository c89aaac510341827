"""Docker's daemon through docker-py: the effects behind ``facts.Daemon``, and its errors as one line each."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import docker
import requests
from docker.types import LogConfig, Ulimit

from appliance.host import spec as limits
from appliance.host.errors import DaemonError, UsageError
from appliance.host.facts import IMAGE_LABEL, SERVICE_LABEL, SPEC_LABEL, Container, Image, Say
from appliance.host.spec import Spec

_SERVICES = ("mjolnir", "mjolnir-cpu")
_NO_DAEMON = (
    "Docker's daemon can't be used: {}; start it (`systemctl start docker`), join its group, or set DOCKER_HOST"
)


class DockerDaemon:
    """A connection to the daemon that DOCKER_HOST names, else to the local one."""

    def __init__(self, timeout_seconds: float = 120.0) -> None:
        """Connect.

        Args:
            timeout_seconds: longest silence of the daemon.

        Raises:
            DaemonError: no daemon answers.
        """
        with _told(_NO_DAEMON):
            self.api: Any = docker.from_env(timeout=timeout_seconds).api
            self.version: dict[str, Any] = self.api.version()

    def find(self, name: str) -> Container | None:
        """See ``facts.Daemon``."""
        try:
            with _told(f"container {name}: {{}}"):
                return _container(self.api.inspect_container(name))
        except _MissingError:
            return None

    def composed(self) -> list[Container]:
        """See ``facts.Daemon``."""
        found = []
        for service in _SERVICES:
            with _told("containers can't be listed: {}"):
                rows = self.api.containers(all=True, filters={"label": f"{SERVICE_LABEL}={service}"})
            found += [container for row in rows if (container := self.find(row["Id"]))]
        return found

    def image(self, name: str) -> Image | None:
        """See ``facts.Daemon``."""
        try:
            with _told(f"image {name}: {{}}"):
                facts = self.api.inspect_image(name)
        except _MissingError:
            return None
        return Image(facts["Id"], name, facts.get("Architecture", ""), (facts.get("Config") or {}).get("Labels") or {})

    def runtimes(self) -> list[str]:
        """See ``facts.Daemon``."""
        with _told(_NO_DAEMON):
            return sorted(self.api.info().get("Runtimes") or {})

    def create(self, name: str, image: Image, spec: Spec) -> str:
        """See ``facts.Daemon``."""
        with _told(f"container {name} can't be created: {{}}"):
            made = self.api.create_container(**self._arguments(name, image, spec))
        return str(made["Id"])

    def start(self, container: str) -> None:
        """See ``facts.Daemon``."""
        with _told("the container can't be started: {}"):
            self.api.start(container)

    def stop(self, container: str, seconds: int) -> None:
        """See ``facts.Daemon``."""
        with _told("the container can't be stopped: {}"):
            self.api.stop(container, timeout=seconds)

    def rename(self, container: str, name: str) -> None:
        """See ``facts.Daemon``."""
        with _told(f"the container can't be renamed to {name}: {{}}"):
            self.api.rename(container, name)

    def remove(self, container: str) -> None:
        """See ``facts.Daemon``."""
        with contextlib.suppress(_MissingError), _told("the container can't be removed: {}"):
            self.api.remove_container(container, force=True)

    def logs(self, container: str, tail: int, *, follow: bool = False) -> Iterator[bytes]:
        """See ``facts.Daemon``."""
        with _told("the container's log can't be read: {}"):
            answer = self.api.logs(container, tail=tail, stream=True, follow=follow)
            yield from answer

    def try_out(self, image: Image, command: list[str], name: str, seconds: int) -> tuple[int, str]:
        """See ``facts.Daemon``."""
        self.remove(name)
        with _told(f"{image.name} can't be tried out: {{}}"):
            made = self.api.create_container(
                image.id,
                command[1:],
                entrypoint=command[:1],
                name=name,
                environment={"HOME": "/tmp"},  # noqa: S108  (the container's own)
                host_config=self.api.create_host_config(network_mode="none", **_hardened()),
            )["Id"]
            try:
                self.api.start(made)
                code = int(self.api.wait(made, timeout=seconds)["StatusCode"])
                return code, self.api.logs(made).decode(errors="replace").strip()
            finally:
                self.api.remove_container(made, force=True)

    def pull(self, name: str, say: Say) -> Image:
        """See ``facts.Daemon``."""
        repository, tag = _reference(name)
        with _told(f"{name} can't be pulled: {{}}"):
            for event in self.api.pull(repository, tag=tag, stream=True, decode=True):
                if "error" in event:
                    raise DaemonError(f"{name} can't be pulled: {event['error']}; without a network use --load FILE")
                say(_progress(event))
        return self._present(name)

    def load(self, archive: Path, say: Say) -> Image:
        """See ``facts.Daemon``."""
        if not archive.is_file():
            raise UsageError(f"{archive}: no such file; accepted: what `mjolnir image save` wrote")
        names = []
        with _told(f"{archive} can't be loaded: {{}}"), archive.open("rb") as stream:
            for event in self.api.load_image(stream):
                if "error" in event:
                    raise UsageError(f"{archive} is no image archive: {event['error']}")
                line = str(event.get("stream", "")).strip()
                say(line or _progress(event))
                if line.startswith("Loaded image"):
                    names.append(line.partition(": ")[2])
        if not names:
            raise UsageError(f"{archive} holds no image; accepted: what `mjolnir image save` wrote")
        return self._present(names[-1])

    def _present(self, name: str) -> Image:
        image = self.image(name)
        if image is None:
            raise DaemonError(f"{name} is not among the daemon's images")
        return image

    def _arguments(self, name: str, image: Image, spec: Spec) -> dict[str, Any]:
        host_config = self.api.create_host_config(
            binds=[_bind(source, target) for target, source in spec.mounts.items()],
            port_bindings={limits.INNER_PORT: (spec.host, spec.port)},
            restart_policy={"Name": "unless-stopped"},
            log_config=LogConfig(type="json-file", config=limits.LOG_OPTIONS),
            shm_size=spec.shm_bytes,
            ulimits=_ulimits(spec),
            runtime=spec.runtime or None,
            **_hardened(),
        )
        return {
            "image": image.id,
            "name": name,
            "environment": dict(spec.environment),
            "ports": [limits.INNER_PORT],
            "labels": {IMAGE_LABEL: image.name, SPEC_LABEL: spec.fingerprint},
            "stop_timeout": spec.stop_seconds,
            "host_config": host_config,
        }


class _MissingError(DaemonError):
    """The daemon knows no such thing."""


@contextlib.contextmanager
def _told(sentence: str) -> Iterator[None]:
    """Make one line of what docker-py raises; ``{}`` in the sentence is its reason."""
    try:
        yield
    except docker.errors.NotFound as error:
        raise _MissingError(sentence.format(_line(error.explanation))) from None
    except docker.errors.APIError as error:
        raise DaemonError(sentence.format(_line(error.explanation))) from None
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise DaemonError(_NO_DAEMON.format(_line(error))) from None


def _line(reason: object) -> str:
    return " ".join(str(reason).split())


def _hardened() -> dict[str, Any]:
    """The limits of every container that is made here."""
    return {
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": limits.TMPFS,
        "init": True,
    }


def _ulimits(spec: Spec) -> list[Ulimit]:
    """Deep stacks for compilers; locked memory only for a GPU: nested daemons refuse it."""
    stack = Ulimit(name="stack", soft=limits.STACK_BYTES, hard=limits.STACK_BYTES)
    if spec.runtime != "nvidia":
        return [stack]
    return [stack, Ulimit(name="memlock", soft=limits.MEMLOCK_BYTES, hard=limits.MEMLOCK_BYTES)]


def _bind(source: str, target: str) -> str:
    path, read_only = (source.removesuffix(":ro"), ":ro") if source.endswith(":ro") else (source, "")
    return f"{path}:{target}{read_only}"


def _reference(name: str) -> tuple[str, str]:
    """Repository and tag; ``host:5000/name`` has none, and a digest counts as one."""
    if "@" in name:
        repository, _, digest = name.partition("@")
        return repository, digest
    repository, _, tag = name.rpartition(":")
    return (repository, tag) if repository and "/" not in tag else (name, "latest")


def _progress(event: dict[str, Any]) -> str:
    words: Iterable[str] = (str(event.get(key, "")) for key in ("id", "status", "progress"))
    return " ".join(word for word in words if word)


def _container(facts: dict[str, Any]) -> Container:
    state = facts["State"]
    ports = (facts.get("NetworkSettings") or {}).get("Ports") or {}
    # What a stopped container will have is in its configuration; a running one may have got its port from the daemon.
    bindings = ports.get(f"{limits.INNER_PORT}/tcp") or (facts["HostConfig"].get("PortBindings") or {}).get(
        f"{limits.INNER_PORT}/tcp"
    )
    address = None
    if bindings:
        host = bindings[0].get("HostIp") or ""
        address = ("127.0.0.1" if host in ("", "0.0.0.0", "::") else host, int(bindings[0]["HostPort"] or 0))  # noqa: S104
    return Container(
        id=facts["Id"],
        name=facts["Name"].lstrip("/"),
        image_id=facts["Image"],
        state=state["Status"],
        restarts=int(facts.get("RestartCount") or 0),
        exit_code=int(state.get("ExitCode") or 0),
        health=(state.get("Health") or {}).get("Status", ""),
        started_at=state.get("StartedAt", ""),
        address=address,
        labels=facts["Config"].get("Labels") or {},
    )
