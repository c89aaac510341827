"""`mjolnir up`, `down`, `logs`, `upgrade`, `rollback`, `doctor` and `image …`: what is typed on the host.

What a command needs is imported inside it, as in ``appliance.cli``. Exit code 1: this machine or the appliance; 2: what
was typed or set. Either way one line says what to do next.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.host.errors import HostError, UsageError
from appliance.host.image_cli import doctor, image_app

if TYPE_CHECKING:
    from appliance.host.facts import Daemon
    from appliance.host.manage import Manager, Outcome
    from appliance.host.spec import Spec

DEFAULT_NAME = "mjolnir"
DEFAULT_IMAGE = "mjolnir:thor"
DEFAULT_DEADLINE_SECONDS = 3600.0  # a cold start on Thor may compile for 45 minutes

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Name = Annotated[str, typer.Option(help="Name of the container.")]
EnvFile = Annotated[Path, typer.Option(help="Settings of the container, as docker compose reads them.")]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the record that interrupted changes go on from.", show_default="~/.local/state/mjolnir"
    ),
]
Runtime = Annotated[
    str | None, typer.Option(help="OCI runtime; empty for Docker's default.", show_default="nvidia where Docker has it")
]
Deadline = Annotated[float, typer.Option(help="Longest time until a new container is ready, seconds.", min=1.0)]


def register(app: typer.Typer) -> None:
    """Add the host commands to the program."""
    for command in (up, down, logs, upgrade, rollback, doctor):
        app.command()(command)
    app.add_typer(image_app, name="image")


def up(
    image: Annotated[
        str | None, typer.Option(help="Image of a first start.", show_default=f"MJOLNIR_IMAGE, else {DEFAULT_IMAGE}")
    ] = None,
    name: Name = DEFAULT_NAME,
    env_file: EnvFile = Path(".env"),
    runtime: Runtime = None,
    state_dir: StateDir = None,
    deadline: Deadline = DEFAULT_DEADLINE_SECONDS,
    as_json: Json = False,
) -> None:
    """Start the appliance's container: what `docker compose up -d` does, where compose is not installed.

    It reads the same .env and sets the same limits. If the settings have changed, a new container takes over from the
    old one as in an upgrade, and the old one returns if the new one does not get ready. The image stays: `mjolnir
    upgrade` changes it. What a power loss interrupted is finished first.
    """
    change = _Change(name, env_file, runtime, state_dir, deadline, quiet=as_json)
    wanted = image or change.variables.get("MJOLNIR_IMAGE") or DEFAULT_IMAGE
    change.run(lambda manager: manager.up(wanted, change.spec), as_json=as_json)


def down(
    name: Name = DEFAULT_NAME,
    env_file: EnvFile = Path(".env"),
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Stop the appliance's container, after its streams have drained. Its models and caches stay."""
    change = _Change(name, env_file, None, state_dir, DEFAULT_DEADLINE_SECONDS, quiet=as_json)
    change.run(lambda manager: manager.down(change.spec.stop_seconds), as_json=as_json)


def logs(
    name: Name = DEFAULT_NAME,
    tail: Annotated[int, typer.Option(help="Lines to begin with.", min=0)] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each line as a JSON object.")] = False,
) -> None:
    """Show the log of the appliance's container, also of one that compose made."""
    from appliance.host.daemon import DockerDaemon  # noqa: PLC0415
    from appliance.host.status import container_of  # noqa: PLC0415

    daemon = DockerDaemon()
    container = container_of(daemon, name)
    if container is None:
        raise HostError(f"there is no container {name}; `mjolnir up` or `docker compose up -d` makes one")
    try:
        for line in _lines(daemon, container.id, tail, follow=follow):
            sys.stdout.write(json.dumps({"line": line}) + "\n" if as_json else line + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # its reader has seen enough; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def upgrade(
    image: Annotated[
        str, typer.Argument(help="REGISTRY/NAME:TAG, which is pulled, or NAME:TAG, which is here.", show_default=False)
    ] = "",
    load: Annotated[Path | None, typer.Option(help="Archive that `mjolnir image save` wrote.")] = None,
    name: Name = DEFAULT_NAME,
    env_file: EnvFile = Path(".env"),
    runtime: Runtime = None,
    state_dir: StateDir = None,
    deadline: Deadline = DEFAULT_DEADLINE_SECONDS,
    as_json: Json = False,
) -> None:
    """Have another image take over, and return to the old one if it does not get ready.

    The new image first runs `mjolnir version --verify` beside the old one, without network or GPU: is its vLLM the
    one that it wants, patched as it wants? Then the old container is stopped and kept, the new one started and
    watched on /health/ready. Every step is recorded: after a power loss the next `up`, `upgrade` or `rollback`
    finishes or undoes what was begun.
    """
    if bool(image) == (load is not None):
        raise UsageError("upgrade: accepted: an image's name or --load FILE, one of them")
    change = _Change(name, env_file, runtime, state_dir, deadline, quiet=as_json)
    change.run(lambda manager: manager.upgrade(image, load, change.spec, change.terminal.say), as_json=as_json)


def rollback(
    name: Name = DEFAULT_NAME,
    env_file: EnvFile = Path(".env"),
    state_dir: StateDir = None,
    deadline: Deadline = DEFAULT_DEADLINE_SECONDS,
    as_json: Json = False,
) -> None:
    """Return to the container before the last upgrade, as it was, or undo an upgrade that was interrupted."""
    change = _Change(name, env_file, None, state_dir, deadline, quiet=as_json)
    change.run(lambda manager: manager.rollback(), as_json=as_json)


class _Change:
    """What the commands that change containers have in common."""

    def __init__(
        self, name: str, env_file: Path, runtime: str | None, state_dir: Path | None, deadline: float, *, quiet: bool
    ) -> None:
        from appliance.host.daemon import DockerDaemon  # noqa: PLC0415
        from appliance.host.journal import Journal, default_folder  # noqa: PLC0415
        from appliance.host.spec import read_variables, spec_of  # noqa: PLC0415
        from appliance.host.terminal import Terminal  # noqa: PLC0415

        self.variables = read_variables(env_file)
        self._daemon: Daemon = DockerDaemon()
        if runtime is None:
            runtime = "nvidia" if "nvidia" in self._daemon.runtimes() else ""
        self.spec: Spec = spec_of(self.variables, env_file.absolute().parent, runtime)
        self.terminal = Terminal(quiet=quiet)
        self._journal = Journal(state_dir or default_folder(), name)
        self._name, self._deadline = name, deadline

    def run(self, command: "Callable[[Manager], Outcome]", *, as_json: bool) -> None:
        """Carry out a command, show its progress and its outcome.

        Raises:
            HostError, UsageError: as the command does.
        """
        from appliance.host.manage import Manager  # noqa: PLC0415
        from appliance.host.readiness import Waiter  # noqa: PLC0415
        from appliance.host.switch import Names, Switch  # noqa: PLC0415
        from appliance.host.terminal import show  # noqa: PLC0415

        names, waiter = Names(self._name), Waiter(self._deadline)
        switch = Switch(self._daemon, self._journal, names, waiter, self.spec.stop_seconds, self.terminal.action)
        try:
            with self.terminal:
                outcome = command(Manager(self._daemon, self._journal, names, switch))
        except KeyboardInterrupt:
            raise HostError("interrupted; `mjolnir up` finishes what was begun, `mjolnir rollback` undoes it") from None
        show(asdict(outcome), outcome.text, as_json=as_json)


def _lines(daemon: "Daemon", container: str, tail: int, *, follow: bool) -> Iterator[str]:
    rest = b""
    for chunk in daemon.logs(container, tail, follow=follow):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
