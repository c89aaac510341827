"""Secrets out of text: those that are known by value, and what a log line shows to be one. Pure.

By value: what secret flags and variables hold, the keys of the keys files, and the forms that these take in a Python
repr, in JSON and in a URL. By shape: the user part of a URL, headers and options that carry credentials, tokens of
well-known services. A secret that a line spells in another way (reversed, cut in two by other text) is not found.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, unquote, urlsplit

MASK = "***"
LONGEST = 1024  # characters of a known secret that are looked for as a whole; longer ones are looked for in pieces

_SHORTEST = 4  # masking shorter ones would make the log unreadable and hide nothing
_PIECE = LONGEST // 2
_SECRET_FLAGS = ("--api-key", "--hf-token")
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|API_?KEYS?|ACCESS_KEY|PRIVATE_KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:$|_)"
)
_HEADERS_VARIABLE = re.compile(r"^OTEL_EXPORTER_OTLP_(?:[A-Z]+_)?HEADERS$")  # name=value,name=value, URL-encoded

_USERINFO = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/?#@\"'<>]{1,512}@")
# Whole headers: what follows is the credential, up to the quote that opened it or the end of the line.
_HEADER = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization|\bset-cookie|\bcookie|\bx-api-key)"
    r"(?P<gap>(?:\\?[\"'])?\s{0,8}[:=,]\s{0,8}(?:b(?=\\?[\"']))?)(?:(?P<quote>\\?[\"'])[^\"'\n]*|[^\"'\s][^\n]*)",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"(?P<name>\bbearer\s{1,8})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_OPTION = re.compile(
    r"(?P<name>api[-_]?key|(?:access|refresh|auth|hf|id)[-_]token|client[-_]secret|password|passwd)"
    r"(?P<gap>(?:\\?[\"'])?\s{0,8}[:=]\s{0,8}[\[(]?b?(?:\\?[\"'])?)(?!None\b|null\b)[^\s\"'\\,;&\])}]+",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\b(?P<name>hf_|sk-)[A-Za-z0-9_-]{20,}")
_HINTS = re.compile(r"://|auth|cookie|key|bearer|token|secret|passw|hf_|sk-", re.IGNORECASE)


class Redactor:
    """Replaces secrets in text; more of them may become known at any time, from any thread."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known: tuple[str, ...] = ()
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        """Mask these from now on, too."""
        forms = {form for secret in secrets for form in _forms(secret)}
        if not forms <= set(self._known):
            self._known = tuple(sorted(forms.union(self._known)))

    def __call__(self, text: str) -> str:
        """The text with every secret masked; no known secret is left, whatever the masks' neighbours are."""
        return self._without_known(_without_shapes(self._without_known(text)))

    def _without_known(self, text: str) -> str:
        # A mask may complete another secret ("a***b"). Every round makes the text shorter, so that there is a last.
        while found := [secret for secret in self._known if secret in text]:
            text = _masked(text, sorted(span for secret in found for span in _spans(text, secret)))
        return text


def secrets_of(words: Iterable[str], environment: Mapping[str, str]) -> set[str]:
    """Values of secret flags on a command line, of variables whose name says it, and passwords in any of their URLs."""
    words = list(words)
    found = {value for name, value in environment.items() if _SECRET_VARIABLE.search(name.upper()) and value}
    for name, value in environment.items():
        if _HEADERS_VARIABLE.match(name.upper()):
            found |= {unquote(pair.partition("=")[2].strip()) for pair in value.split(",")}
    for value in (*words, *environment.values()):
        found |= userinfo_of(value.partition("=")[2] if value.startswith("--") and "=" in value else value)
    secret = False
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            secret = name.replace("_", "-") in _SECRET_FLAGS
            if secret and value:
                found.add(value)
        elif secret:
            found.add(word)  # --api-key takes several
    return found - {""}


def userinfo_of(url: str) -> set[str]:
    """The password of a URL, as it is written and as it is meant; the user's name too where it stands alone."""
    if "://" not in url or "@" not in url:
        return set()
    try:
        parts = urlsplit(url)
        secret = parts.password or parts.username
    except ValueError:
        return set()
    return {secret, unquote(secret)} if secret else set()


def _forms(secret: str) -> Iterator[str]:
    """How a secret may be written. Its lines apart, because a log has no others; a long one in pieces."""
    for line in secret.splitlines():
        for form in {line, line.strip(), repr(line)[1:-1], json.dumps(line)[1:-1], quote(line), quote(line, safe="")}:
            # One that is all asterisks would never be gone, and tells nothing.
            if len(form) < _SHORTEST or not form.strip("*"):
                continue
            if len(form) <= LONGEST:
                yield form
            else:
                yield from (form[at : at + _PIECE] for at in range(0, len(form) - _PIECE, _PIECE))
                yield form[-_PIECE:]


def _spans(text: str, secret: str) -> Iterator[tuple[int, int]]:
    at = text.find(secret)
    while at >= 0:
        yield at, at + len(secret)
        at = text.find(secret, at + 1)


def _masked(text: str, spans: list[tuple[int, int]]) -> str:
    """The text with a mask in place of each span; spans that touch or overlap share one."""
    pieces: list[str] = []
    end = 0
    begun = False
    for start, stop in spans:
        if not begun or start > end:
            pieces += (text[end:start], MASK)
            begun = True
        end = max(end, stop)
    return "".join((*pieces, text[end:]))


def _without_shapes(text: str) -> str:
    if not _HINTS.search(text):
        return text
    text = _USERINFO.sub(rf"\g<scheme>{MASK}@", text)
    text = _HEADER.sub(lambda match: f"{match['name']}{match['gap']}{match['quote'] or ''}{MASK}", text)
    text = _SCHEME.sub(rf"\g<name>{MASK}", text)
    text = _OPTION.sub(rf"\g<name>\g<gap>{MASK}", text)
    return _TOKEN.sub(rf"\g<name>{MASK}", text)
