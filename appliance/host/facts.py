"""What the host commands know of containers and images, and what they ask of Docker's daemon."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from appliance.host.spec import Spec

IMAGE_LABEL = "org.mjolnir.image"
SPEC_LABEL = "org.mjolnir.spec"
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Image:
    """An image that the daemon has: id, the name it was asked for by, architecture (Docker's word), labels."""

    id: str
    name: str
    architecture: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Container:
    """A container as the daemon shows it.

    Attributes:
        state: Docker's word: created, running, restarting, exited, paused, removing or dead.
        restarts: how often the daemon started it again by itself since it was last started by hand.
        address: host and port of the machine where its port 8000 can be reached; None where it is not published.
    """

    id: str
    name: str
    image_id: str
    state: str
    restarts: int = 0
    exit_code: int = 0
    health: str = ""
    started_at: str = ""
    address: tuple[str, int] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether its process is there, or about to be."""
        return self.state in ("running", "restarting", "paused")

    @property
    def image(self) -> str:
        """Name of its image, else its id."""
        return self.labels.get(IMAGE_LABEL) or self.image_id[:19]

    @property
    def project(self) -> str:
        """The compose project that made it; empty where none did."""
        return self.labels.get(PROJECT_LABEL, "")


class Daemon(Protocol):
    """What the host commands ask of Docker. Every method raises DaemonError."""

    def find(self, name: str) -> Container | None:
        """The container of this name or id."""

    def composed(self) -> list[Container]:
        """Appliances that compose made."""

    def image(self, name: str) -> Image | None:
        """The image of this name or id."""

    def runtimes(self) -> list[str]:
        """Names of the runtimes that the daemon can use."""

    def create(self, name: str, image: Image, spec: Spec) -> str:
        """Make a container, not started; returns its id."""

    def start(self, container: str) -> None:
        """Start a container; nothing if it runs."""

    def stop(self, container: str, seconds: int) -> None:
        """SIGTERM, some seconds, SIGKILL; nothing if it does not run."""

    def rename(self, container: str, name: str) -> None:
        """Give a container another name."""

    def remove(self, container: str) -> None:
        """Remove a container, also a running one; its named volumes stay."""

    def logs(self, container: str, tail: int, *, follow: bool = False) -> Iterator[bytes]:
        """Its last lines, then what comes."""

    def try_out(self, image: Image, command: list[str], name: str, seconds: int) -> tuple[int, str]:
        """Run a command in a container of its own without network; returns exit code and output."""

    def pull(self, name: str, say: Say) -> Image:
        """Have the daemon fetch an image."""

    def load(self, archive: Path, say: Say) -> Image:
        """Hand an image archive to the daemon."""
