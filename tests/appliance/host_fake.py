"""A Docker daemon in memory, and a way to be cut off before or after any of its effects."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from appliance.host.errors import DaemonError
from appliance.host.facts import IMAGE_LABEL, SPEC_LABEL, Container, Image
from appliance.host.readiness import Answer
from appliance.host.spec import Spec

EFFECTS = ("create", "start", "stop", "rename", "remove")


class PowerLoss(BaseException):
    """Not an Exception: nothing may catch it on its way."""


class FakeDaemon:
    """Keeps names unique and refuses what Docker refuses; images whose name has "broken" never get ready."""

    def __init__(self) -> None:
        self.containers: dict[str, Container] = {}
        self.images: dict[str, Image] = {}
        self.calls: list[str] = []
        self.cut: tuple[int, str] | None = None
        self._number = 0

    def add_image(self, name: str) -> Image:
        self.images[name] = Image(f"sha256:{name}", name, "amd64")
        return self.images[name]

    def _effect(self, what: str, apply) -> None:
        self.calls.append(what)
        number = len(self.calls) - 1
        if self.cut == (number, "before"):
            raise PowerLoss
        apply()
        if self.cut == (number, "after"):
            raise PowerLoss

    def _change(self, container: str, **values: object) -> None:
        self.containers[container] = replace(self.containers[container], **values)

    def _known(self, container: str) -> Container:
        found = self.find(container)
        if found is None:
            raise DaemonError(f"no such container {container}")
        return found

    def find(self, name: str) -> Container | None:
        return next((one for one in self.containers.values() if name in (one.id, one.name)), None)

    def composed(self) -> list[Container]:
        return [one for one in self.containers.values() if one.project]

    def image(self, name: str) -> Image | None:
        return next((one for one in self.images.values() if name in (one.id, one.name)), None)

    def runtimes(self) -> list[str]:
        return ["runc"]

    def create(self, name: str, image: Image, spec: Spec) -> str:
        if self.find(name):
            raise DaemonError(f"the name {name} is taken")
        self._number += 1
        made = Container(
            f"id{self._number}",
            name,
            image.id,
            "created",
            address=("127.0.0.1", spec.port),
            labels={IMAGE_LABEL: image.name, SPEC_LABEL: spec.fingerprint},
        )
        self._effect("create", lambda: self.containers.update({made.id: made}))
        return made.id

    def start(self, container: str) -> None:
        found = self._known(container)
        for other in self.containers.values():
            if other.running and other.id != found.id and other.address == found.address:
                raise DaemonError("port is already allocated")
        self._effect("start", lambda: self._change(found.id, state="running"))

    def stop(self, container: str, seconds: int) -> None:
        found = self._known(container)
        self._effect("stop", lambda: self._change(found.id, state="exited"))

    def rename(self, container: str, name: str) -> None:
        found = self._known(container)
        if self.find(name):
            raise DaemonError(f"the name {name} is taken")
        self._effect("rename", lambda: self._change(found.id, name=name))

    def remove(self, container: str) -> None:
        found = self.find(container)
        if found:
            self._effect("remove", lambda: self.containers.pop(found.id))

    def logs(self, container: str, tail: int, *, follow: bool = False) -> Iterator[bytes]:
        yield f"log of {container}\n".encode()

    def try_out(self, image: Image, command: list[str], name: str, seconds: int) -> tuple[int, str]:
        return (1, "exec format error") if "foreign" in image.name else (0, '{"mjolnir": "0.1.0"}')

    def pull(self, name: str, say) -> Image:
        raise DaemonError("no network")

    def load(self, archive: Path, say) -> Image:
        return self.add_image(archive.stem)

    def probe(self, host: str, port: int) -> Answer:
        running = [one for one in self.containers.values() if one.state == "running"]
        return Answer(len(running) == 1 and "broken" not in running[0].image, "starting")

    def shown(self) -> dict[str, tuple[str, str]]:
        return {one.name: (one.image, one.state) for one in self.containers.values()}
