"""What the host commands do, without a terminal: each function gets its daemon and returns what became of it."""

import json
from dataclasses import dataclass
from pathlib import Path

from appliance.host.errors import DaemonError, HostError, UpgradeError, UsageError
from appliance.host.facts import SPEC_LABEL, Daemon, Image, Say
from appliance.host.journal import Journal, Record
from appliance.host.plan import State
from appliance.host.spec import Spec
from appliance.host.switch import Names, Switch, failed_log

# Imports nothing heavy and touches no GPU, so it runs beside an engine that holds all memory: what it shows is that
# the image fits this machine's architecture, starts under the container's limits, and is an appliance.
SELF_TEST = ["mjolnir", "version", "--verify", "--json"]
SELF_TEST_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """What a command did: one word for programs, one line for people."""

    done: str
    text: str
    image: str = ""


class Manager:
    """One appliance on one daemon."""

    def __init__(self, daemon: Daemon, journal: Journal, names: Names, switch: Switch) -> None:
        self._daemon = daemon
        self._journal = journal
        self._names = names
        self._switch = switch

    def up(self, image: str, spec: Spec) -> Outcome:
        """Have the appliance run as the settings say; the image of an existing container stays.

        Raises:
            UsageError: there is no such image, or compose owns the appliance.
            HostError: it could not be started.
        """
        self._refuse_composed("`docker compose up -d` starts it")
        with self._journal.held():
            ended = self._switch.resume()
            note = f"{_ending(ended)}; " if ended else ""
            current = self._daemon.find(self._names.current)
            if current is None:
                return self._first(image, spec, note)
            if current.labels.get(SPEC_LABEL) != spec.fingerprint:
                same = self._daemon.image(current.image_id)
                if same is None:
                    raise UsageError(f"the image of {current.name} is gone; accepted: `mjolnir upgrade IMAGE`")
                return self._switched(self._switch.upgrade(Image(same.id, current.image, same.architecture), spec))
            word = "running" if current.running else "started"
            if not current.running:
                self._daemon.start(current.id)
            return Outcome(word, f"{note}{current.name} is {word} with {current.image}", current.image)

    def down(self, stop_seconds: int) -> Outcome:
        """Stop the appliance and keep its container; it stays down, also after a reboot.

        Raises:
            UsageError: compose owns the appliance.
            HostError: it could not be stopped.
        """
        self._refuse_composed("`docker compose down` stops it")
        with self._journal.held():
            self._switch.resume(back=True)
            current = self._daemon.find(self._names.current)
            if current is None or not current.running:
                return Outcome("down", f"{self._names.current} does not run")
            self._daemon.stop(current.id, stop_seconds)
            return Outcome("stopped", f"{current.name} is stopped; `mjolnir up` starts it again", current.image)

    def upgrade(self, name: str, archive: Path | None, spec: Spec, say: Say) -> Outcome:
        """Have another image take over, or return to the old one.

        Args:
            name: the image; with a slash in it, it is pulled. Unused with an archive.
            archive: what `mjolnir image save` wrote.
            spec: the container to make.
            say: told of the download.

        Raises:
            UpgradeError: the old container serves again, or the new image was refused before anything changed.
            HostError: neither was reached; the next command goes on from there.
        """
        self._refuse_composed("set MJOLNIR_IMAGE in .env, then `docker compose up -d`")
        with self._journal.held():
            self._switch.resume()
            image = self._daemon.load(archive, say) if archive else self._obtained(name, say)
            self._try_out(image)
            current = self._daemon.find(self._names.current)
            if current is not None and current.running and current.image_id == image.id:
                return Outcome("current", f"{current.name} runs this image already", image.name)
            failed_log(self._journal, self._names).unlink(missing_ok=True)
            return self._switched(self._switch.upgrade(image, spec))

    def rollback(self) -> Outcome:
        """Return to the previous container; an interrupted upgrade is undone instead.

        Raises:
            UpgradeError: there is none, or it did not get ready and the one before serves again.
            HostError: neither was reached.
        """
        self._refuse_composed("set MJOLNIR_IMAGE in .env to the old image, then `docker compose up -d`")
        with self._journal.held():
            ended = self._switch.resume(back=True)
            if ended is not None and ended.state is State.UNDONE:
                return Outcome("undone", _ending(ended), ended.image)
            failed_log(self._journal, self._names).unlink(missing_ok=True)
            return self._switched(self._switch.rollback())

    def _first(self, image: str, spec: Spec, note: str) -> Outcome:
        left = [name for name in (self._names.old, self._names.next) if self._daemon.find(name)]
        if left:  # a change whose journal is not in this folder
            raise HostError(
                f"container {left[0]} is left of a change that is not recorded in {self._journal.folder}; use that "
                f"change's --state-dir, or `docker rename {left[0]} {self._names.current}` and start again"
            )
        found = self._daemon.image(image)
        if found is None:
            raise UsageError(
                f"there is no image {image} here; accepted: what `mjolnir image build` or `mjolnir image load` made "
                f"(--image or MJOLNIR_IMAGE)"
            )
        self._daemon.start(self._daemon.create(self._names.current, found, spec))
        return Outcome("created", f"{note}{self._names.current} is started with {image}", image)

    def _switched(self, record: Record) -> Outcome:
        if record.state is State.DONE:
            return Outcome(
                record.operation, f"{record.image} is ready; `mjolnir rollback` returns to the one before", record.image
            )
        log = failed_log(self._journal, self._names)
        hint = f"; its last lines: {log}" if log.exists() else ""
        raise UpgradeError(f"{record.image} did not take over: {record.reason}; the old container is back{hint}")

    def _obtained(self, name: str, say: Say) -> Image:
        """From its registry; a name without a slash is a local build, which no registry is asked for.

        Docker would complete such a name to its public registry's, where anyone may have taken it.
        """
        here = self._daemon.image(name)
        if "/" not in name:
            if here is None:
                raise UsageError(f"there is no image {name} here; accepted: REGISTRY/NAME:TAG, or --load FILE")
            return here
        try:
            return self._daemon.pull(name, say)
        except DaemonError as error:
            if here is None:
                raise
            say(f"{error}; going on with the one that is here")
            return here

    def _try_out(self, image: Image) -> None:
        code, output = self._daemon.try_out(image, SELF_TEST, self._names.trial, SELF_TEST_SECONDS)
        last = output.splitlines()[-1] if output else "no output"
        if code == 0:
            try:
                version = json.loads(last)["mjolnir"]
            except (ValueError, KeyError, TypeError):
                version = ""
            if version:
                return
        raise UpgradeError(
            f"{image.name} ({image.architecture or 'unknown architecture'}) failed its self-test "
            f"(`{' '.join(SELF_TEST)}`, exit code {code}): {last}; nothing was changed"
        )

    def _refuse_composed(self, instead: str) -> None:
        for container in self._daemon.composed():
            if container.running:
                raise UsageError(
                    f"{container.name} was made by docker compose (project {container.project}), which must change "
                    f"it too: {instead}"
                )


def _ending(record: Record) -> str:
    """How an interrupted change was brought to an end."""
    if record.state is State.DONE:
        return f"an interrupted {record.operation} to {record.image} was finished"
    return f"an interrupted {record.operation} to {record.image} was undone"
