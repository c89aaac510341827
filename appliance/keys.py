"""API keys from files: who may ask the model, and who may look at the appliance.

One key a line, ``name:key`` or ``name:sha256:<64 hex digits>``; blank lines and lines that begin with ``#`` are
skipped. A name may stand on several lines, which is how a key is replaced: the new one is added, the clients change
over, the old one goes. ``printf %s "$KEY" | sha256sum`` makes a hash. A file is read again when it changes; one that
can't be used leaves the keys as they were, so half a file that an editor is writing locks nobody out and lets nobody
in. That holds for an empty file too: to revoke the last key, put another one in its place.

Prometheus gets the admin key, without its name, in a file of its own::

    scrape_configs:
      - job_name: mjolnir
        authorization: {type: Bearer, credentials_file: /etc/prometheus/admin-key}

(``bearer_token_file`` in older releases). A browser asks for a password and sends it as HTTP Basic, which the
admin's GET routes take as well: any user name, the key as the password.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import SettingsError

log = logging.getLogger(__name__)

ANONYMOUS = ""  # name of everyone where no keys are asked for

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_CHECK_SECONDS = 1.0
_LEAST_WORTH = 8  # shorter is no key, and a file that is none at all would mask every word of the log
_SETTLED_NS = 2_000_000_000  # a file younger than this may change again without a new time stamp
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """One line of a keys file; the key itself is kept as its SHA-256 only."""

    name: str
    digest: bytes


@dataclass(frozen=True)
class _Reading:
    keys: tuple[Key, ...]
    identity: tuple[int, ...]  # of the file that they came from
    mode: int


class KeyRing:
    """The keys of one file.

    Raises:
        SettingsError: the file can't be used; only when constructed.
    """

    def __init__(self, path: Path, setting: str, learn: Callable[[str], None] = lambda _: None) -> None:
        self._learn = learn  # told every key, so that logs can mask it; a hashed one once it is used
        self._learned: set[bytes] = set()
        self._path = path
        self._setting = setting
        self._complaint = ""
        self._identity: tuple[int, ...] = ()
        self._keys: tuple[Key, ...] = ()
        self._take(self._read())

    def name_of(self, given: bytes) -> str | None:
        """Name of the key, or None when there is none such. Takes as long for any wrong key as for any right one."""
        digest = hashlib.sha256(given).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.name
        if found is not None and digest not in self._learned:
            self._learned.add(digest)
            self._learn(given.decode("latin-1"))
        return found

    async def watch(self) -> None:
        """Read the file again whenever it has changed; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            await self.refresh()

    async def refresh(self) -> bool:
        """Look at the file once; whether keys were taken from it. Errors are logged once and change nothing."""
        try:
            reading = await asyncio.to_thread(self._read_if_changed)
        except (SettingsError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("the keys stay as they were: %s", error)
            return False
        if reading is None:
            return False
        changed = reading.keys != self._keys
        self._take(reading)
        if changed:
            log.info("%s: %d keys read again", self._setting, len(self._keys))
        return changed

    def _take(self, reading: _Reading) -> None:
        if reading.mode & 0o077 and reading.identity != self._identity:
            log.warning(
                "%s=%s: others may read it (mode %03o); chmod 600 it", self._setting, self._path, reading.mode & 0o777
            )
        self._keys, self._identity, self._complaint = reading.keys, reading.identity, ""

    def _read_if_changed(self) -> _Reading | None:
        found = os.stat(self._path)
        settled = time.time_ns() - found.st_mtime_ns > _SETTLED_NS
        return None if settled and _identity(found) == self._identity else self._read()

    def _read(self) -> _Reading:
        """The file's keys.

        Raises:
            SettingsError: it can't be read or has a line that is none.
        """
        try:
            # Opening a named pipe would wait for its writer otherwise.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                    raise self._error("not a regular file of at most 1 MiB")
                text = file.read(_MOST_BYTES).decode()
        except UnicodeDecodeError:
            raise self._error("not text") from None
        except OSError as error:
            raise self._error(str(error.strerror)) from None
        for key in plain_keys(text):
            self._learn(key)
        try:
            return _Reading(parse(text), _identity(found), found.st_mode)
        except ValueError as error:
            raise self._error(str(error)) from None

    def _error(self, problem: str) -> SettingsError:
        return SettingsError(f"{self._setting}={str(self._path)!r}: {problem}; accepted: a file of name:key lines")


def parse(text: str) -> tuple[Key, ...]:
    """Keys of a file's text.

    Raises:
        ValueError: a line that is none, by its number only: what it says may be half a key; or no key at all.
    """
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key = line.strip().partition(":")
        if not _NAME.fullmatch(name):
            raise ValueError(f"line {number} does not begin with a name of letters, digits, '.', '_' and '-'")
        keys.append(Key(name, _digest(key, number)))
    if not keys:
        raise ValueError("there is no key in it")
    return tuple(keys)


def plain_keys(text: str) -> list[str]:
    """Keys that stand in a file's text as they are, also in one that can't be used as a whole."""
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    keys = [key for _, separator, key in (line.partition(":") for line in lines) if separator]
    return [key for key in keys if len(key) >= _LEAST_WORTH and not key.startswith("sha256:")]


def _digest(key: str, number: int) -> bytes:
    if key.startswith("sha256:"):
        if not _HASH.fullmatch(key.removeprefix("sha256:")):
            raise ValueError(f"line {number} has no 64 hex digits after sha256:")
        return bytes.fromhex(key.removeprefix("sha256:"))
    if not _KEY.fullmatch(key):
        raise ValueError(f"line {number} has no key of 16 to 512 printable characters")
    return hashlib.sha256(key.encode()).digest()


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode


class Gate:
    """Who is let in: to the model's routes with the clients' keys, to the appliance's own with the admin's."""

    def __init__(self, clients: KeyRing | None = None, admins: KeyRing | None = None) -> None:
        self._clients = clients
        self._admins = admins

    def client(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Name of the client that a request's headers prove, or None."""
        if self._clients is None:
            return ANONYMOUS
        given = _credentials(headers, basic=False)
        return None if given is None else self._clients.name_of(given)

    def admin(self, headers: Iterable[tuple[bytes, bytes]], *, safe: bool) -> bool:
        """Whether an operator asks.

        Args:
            headers: of the request.
            safe: the request changes nothing. A browser adds a remembered password to requests that another site
                makes it send, so only these may prove themselves that way.
        """
        if self._admins is None:
            return True
        given = _credentials(headers, basic=safe)
        return given is not None and self._admins.name_of(given) is not None

    async def watch(self) -> None:
        """Follow changes of the files; runs until it is cancelled."""
        await asyncio.gather(*(ring.watch() for ring in (self._clients, self._admins) if ring is not None))


def build_gate(
    clients: Path | None,
    admins: Path | None,
    address: str,
    *,
    allow_anonymous: bool,
    learn: Callable[[str], None] = lambda _: None,
) -> Gate:
    """The gate of an appliance that listens on an address.

    Raises:
        SettingsError: a file can't be used, or everyone on the network could use the model unasked.
    """
    loopback = is_loopback(address)
    if clients is None and not loopback and not allow_anonymous:
        raise SettingsError(
            f"host={address!r}: reached from the network without API keys; accepted: a keys file (--api-keys-file or "
            "MJOLNIR_API_KEYS_FILE), host 127.0.0.1, or MJOLNIR_ALLOW_ANONYMOUS=true"
        )
    if admins is None and not loopback:
        log.warning("/metrics, /status and / are open to everyone who reaches %s; admin_keys_file closes them", address)
    return Gate(
        None if clients is None else KeyRing(clients, "api_keys_file", learn),
        None if admins is None else KeyRing(admins, "admin_keys_file", learn),
    )


def is_loopback(address: str) -> bool:
    """Whether an IP address is reached from this machine only."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _credentials(headers: Iterable[tuple[bytes, bytes]], *, basic: bool) -> bytes | None:
    """The key in a request's headers; None when there is none, or more than one header that claims to have it."""
    lines = [value for name, value in headers if name.lower() == b"authorization"]
    if len(lines) != 1:
        return None
    scheme, _, rest = lines[0].strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if basic and scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None
