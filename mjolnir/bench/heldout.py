"""The text that quality is measured on: entries of The Jargon File, from Debian's package ``jargon-text``.

English prose, in the public domain, fetched by package name and unpacked without being installed. No prompt set of ours
has a word of it, so scales are never calibrated on it. (A model may well have read it; what is measured is how
little a cache format changes what the model says of it, not how well it says it.)
"""

import gzip
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from appliance.wheels import cache_root

PACKAGE = "jargon-text"
MEMBER = "usr/share/doc/jargon-text/jargon.txt.gz"
# Of the text itself, unpacked: Debian may build the package again around the same text.
SHA256 = "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"

_FIRST_ENTRY = "   :abbrev:"
_FRAME = re.compile(r"[\u2500-\u257f]")  # tables and rules
_INDENT = "   "


class TextError(Exception):
    """The text is not to be had, or is another than what was pinned."""


def fetch() -> str:
    """The whole file, from the cache folder or, once, from the package.

    Raises:
        TextError: apt-get or dpkg-deb failed, or the text is not the pinned one.
    """
    target = cache_root() / "text" / "jargon.txt"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".text-", dir=target.parent) as staging:
            staged = Path(staging) / target.name
            staged.write_bytes(_unpacked(Path(staging)))
            staged.replace(target)
    content = target.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise TextError(f"{target}: expected SHA-256 {SHA256}, got {digest}; remove it, or get {PACKAGE} 4.4.7-4.1")
    return content.decode()


def _unpacked(folder: Path) -> bytes:
    # apt's own user must be able to write here, else it warns and downloads as root.
    folder.chmod(0o755)
    _run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", PACKAGE], folder)
    package = next(folder.glob("*.deb"))
    _run(["dpkg-deb", "--extract", str(package), "unpacked"], folder)
    return gzip.decompress((folder / "unpacked" / MEMBER).read_bytes())


def _run(command: list[str], folder: Path) -> None:
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except FileNotFoundError as error:
        raise TextError(f"can't get {PACKAGE}: {command[0]} is not installed; needs a Debian or Ubuntu") from error
    if result.returncode:
        reason = (result.stderr.strip() or "no reason given").splitlines()[-1]
        raise TextError(f"can't get {PACKAGE}: {command[0]} says {reason!r}; `apt-get update` may help")


def prose(text: str, characters: int) -> str:
    """The first entries of the glossary as plain paragraphs: no indent, no tables, no runs of blank lines.

    Args:
        text: the whole file.
        characters: how much to return.

    Raises:
        TextError: the text has no glossary, or not as much of it.
    """
    start = text.find(_FIRST_ENTRY)
    lines = [line.removeprefix(_INDENT).rstrip() for line in text[start:].splitlines() if not _FRAME.search(line)]
    plain = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    if start < 0 or len(plain) < characters:
        raise TextError(f"the text has {len(plain) if start >= 0 else 0} characters of glossary; {characters} wanted")
    return plain[:characters]


def windows(tokens: list[int], length: int, count: int) -> list[list[int]]:
    """Consecutive, disjoint pieces of a text.

    Args:
        tokens: of the text.
        length: tokens of a piece.
        count: pieces.

    Raises:
        TextError: the text is too short.
    """
    if len(tokens) < length * count:
        raise TextError(f"{count} windows of {length} tokens wanted; the text has {len(tokens)} tokens")
    return [tokens[first : first + length] for first in range(0, length * count, length)]
