"""The record of a change on the disk: written whole or not at all, and held by one command at a time."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.host.errors import JournalError
from appliance.host.plan import ENDS, Operation, State

_VERSION = 1


@dataclass(frozen=True)
class Record:
    """One change of containers.

    Attributes:
        operation: what is being done.
        state: how far it is.
        old: id of the container that served before; empty if there was none.
        new: id of the container that takes over; empty until it is created.
        image: name of the new container's image.
        was_running: whether the old container ran when the change began.
        reason: why the change failed, one line; empty while it has not.
    """

    operation: Operation
    state: State
    old: str = ""
    new: str = ""
    image: str = ""
    was_running: bool = False
    reason: str = ""

    @property
    def pending(self) -> bool:
        """Whether something is left to do."""
        return self.state not in ENDS


class Journal:
    """The record of the last change of one appliance, in a folder of its user's."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._file = folder / f"{name}.json"
        self._lock = folder / f"{name}.lock"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other commands out; the kernel lets go when this process ends, however it does.

        Raises:
            JournalError: another command is at work, or the folder can't be written to.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(
                f"{self.folder}: {error.strerror}; accepted: a folder to write to (--state-dir)"
            ) from None
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Record | None:
        """The last record; None if there is none.

        Raises:
            JournalError: the file is not one of ours.
        """
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JournalError(f"{self._file}: {error.strerror}") from None
        try:
            values = json.loads(text)
            if values.pop("version") != _VERSION:
                raise ValueError
            values["operation"], values["state"] = Operation(values["operation"]), State(values["state"])
            return Record(**values)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise JournalError(
                f"{self._file}: not a record of this version; look at `docker ps -a`, then move the file away"
            ) from None

    def write(self, record: Record) -> None:
        """Replace the record; after this call it survives a power loss.

        Raises:
            JournalError: the folder can't be written to.
        """
        data = json.dumps({"version": _VERSION, **asdict(record)}, indent=2).encode() + b"\n"
        draft = self._file.with_suffix(".new")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(self._file)
            self._sync_folder()
        except OSError as error:
            raise JournalError(f"{self._file}: {error.strerror}") from None

    def _sync_folder(self) -> None:
        """The new name itself is on the disk only once its folder is."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError("another mjolnir command is changing the appliance; wait until it has ended") from None


def default_folder() -> Path:
    """``$XDG_STATE_HOME/mjolnir``, else ``~/.local/state/mjolnir``."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "mjolnir"
