"""The doctor's questions to Docker: daemon, nvidia runtime, compose plugin, image."""

import platform
import subprocess
from collections.abc import Iterator

from appliance.errors import ApplianceError
from appliance.host.doctor import Finding, Level
from appliance.host.facts import Daemon

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_SECONDS = 20.0


def docker_findings(image: str) -> Iterator[Finding]:
    """Everything about the container runtime; one finding where no daemon answers."""
    from appliance.host.daemon import DockerDaemon  # noqa: PLC0415

    try:
        daemon = DockerDaemon(_SECONDS)
        yield Finding("docker", Level.OK, f"version {daemon.version.get('Version', 'unknown')}")
        yield runtime_finding(daemon)
        yield image_finding(daemon, image, platform.machine())
    except ApplianceError as error:
        yield Finding("docker", Level.FAIL, str(error), "`sudo apt-get install docker.io`, then join the group docker")
    yield compose_finding()


def runtime_finding(daemon: Daemon) -> Finding:
    """Whether containers can see the GPU."""
    names = daemon.runtimes()
    if "nvidia" in names:
        return Finding("nvidia runtime", Level.OK, ", ".join(names))
    fix = "on a Thor: install nvidia-container-toolkit, `sudo nvidia-ctk runtime configure`, restart Docker"
    return Finding("nvidia runtime", Level.WARN, ", ".join(names) or "none", fix)


def image_finding(daemon: Daemon, name: str, machine: str) -> Finding:
    """Whether the image is here, and made for this machine."""
    found = daemon.image(name)
    if found is None:
        return Finding("image", Level.WARN, f"{name} is not here", "`mjolnir image build` or `mjolnir image load FILE`")
    labels = ", ".join(f"{key}={value}" for key, value in sorted(found.labels.items()) if "mjolnir" in key)
    seen = f"{name}, {found.architecture}{labels and '; ' + labels}"
    wanted = _MACHINES.get(machine, machine)
    if found.architecture != wanted:
        return Finding("image", Level.FAIL, seen, f"this machine is {wanted}: build or load an image for it")
    return Finding("image", Level.OK, seen)


def compose_finding() -> Finding:
    """Whether `docker compose` works; `mjolnir up` does without."""
    command = ["docker", "compose", "version", "--short"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("compose", Level.UNKNOWN, str(error), "`mjolnir up` needs none")
    if done.returncode:
        return Finding("compose", Level.WARN, "no compose plugin", "install docker-compose-plugin, or use `mjolnir up`")
    return Finding("compose", Level.OK, done.stdout.strip())
