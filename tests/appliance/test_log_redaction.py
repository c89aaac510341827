"""No secret in any record, in any format."""

import io
import json
import logging
import string
import urllib.parse

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.logging import RichHandler

from appliance.engine_log import EngineLog
from appliance.log import ENGINE, JsonLines, TextLines, logging_to
from appliance.redaction import LONGEST, Redactor, secrets_of

PRINTABLE = "".join(sorted(set(string.printable) - set("\t\n\r\x0b\x0c")))
SECRETS = st.lists(st.text(PRINTABLE, min_size=8, max_size=40), min_size=1, max_size=4)
FORMATS = ("text", "json", "rich")


class _Lines(logging.Handler):
    """Every format at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = {name: io.StringIO() for name in FORMATS}
        console = Console(file=self.written["rich"], width=3000)
        json_lines = logging.StreamHandler(self.written["json"])
        json_lines.setFormatter(JsonLines())
        self.all = (
            logging.StreamHandler(self.written["text"]),
            json_lines,
            RichHandler(console=console, markup=False, show_path=False),
        )
        self.all[0].setFormatter(TextLines())
        self.all[2].setFormatter(TextLines())
        self.setFormatter(TextLines())

    def emit(self, record):
        for handler in self.all:
            handler.handle(record)


def all_formats(redactor: Redactor, say) -> dict[str, str]:
    handler = _Lines()
    with logging_to(handler, "debug", redactor):
        say()
    return {name: out.getvalue() for name, out in handler.written.items()}


def speak(redactor: Redactor, texts: list[str]) -> None:
    """Say the texts in every way that a message can hold them."""
    log = logging.getLogger("appliance.test")
    for text in texts:
        log.info("%s", text)
        log.info("in a field", extra={"url": text, "nested": {"deep": [text]}})
        log.warning("in a repr: %r", [text])
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("failed with %s", text)
    engine = EngineLog(redactor, lambda _: None)
    for text in texts:
        engine.feed(f"(Worker pid=1) ERROR 12-01 04:06:58 [a.py:9] {text}\n".encode(), 0.0)
        engine.feed(f"Traceback (most recent call last):\nValueError: {text!r}\n".encode(), 0.0)
    engine.close()
    for line in (*engine.tail(1000), *engine.since(0.0)):
        log.info("%s", line)


@settings(max_examples=40, deadline=None)
@given(secrets=SECRETS, words=st.lists(st.text(PRINTABLE, max_size=12), min_size=1, max_size=4), data=st.data())
def test_no_secret_is_in_any_record_of_any_format(secrets, words, data):
    parts = [part for word in words for part in (word, data.draw(st.sampled_from(secrets)))]
    texts = ["".join(parts), " ".join(parts), f"{secrets[0][:5]}{secrets[-1]}{secrets[0]}"]
    redactor = Redactor(secrets)
    bare = all_formats(redactor, lambda: speak(redactor, ["x"]))
    # A secret that is a piece of the frame ("appliance.test") is none.
    assume(not any(secret.strip() in text for secret in secrets for text in bare.values()))
    for name, text in all_formats(redactor, lambda: speak(redactor, texts)).items():
        lines = (
            [text] if name != "json" else [value for line in text.splitlines() for value in strings(json.loads(line))]
        )
        for secret in secrets:
            assert not any(secret in line for line in lines), (name, secret)


def strings(record: dict) -> list[str]:
    return [value for value in record.values() if isinstance(value, str)]


@settings(max_examples=150, deadline=None)
@given(secret=st.text(string.ascii_letters + string.digits, min_size=8, max_size=64), data=st.data())
def test_a_secret_in_two_reads_of_the_pipe(secret, data):
    raw = f"key={secret} \x1b[31m{secret}\x1b[0m\rbar {secret}\r\nlast {secret}".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    told: list[str] = []
    log = EngineLog(Redactor([secret]), told.append)
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        log.feed(raw[start:stop], 0.0)
        log.idle(0.0)  # as after a silence between two reads
    log.close()
    assert told == log.tail(9) == log.since(0.0) == ["key=*** ***", "bar ***", "last ***"]


@pytest.mark.parametrize("before", [0, 7_000, 8_100, 8_192, 16_300, 16_380, 16_384])
@pytest.mark.parametrize("size", [40, LONGEST, 3 * LONGEST + 7])
def test_a_secret_where_a_long_line_is_cut(before, size):
    secret = "".join(chr(65 + index * 7 % 26) for index in range(size))
    log = EngineLog(Redactor([secret]), lambda _: None)
    log.feed(("-" * before + secret * 9 + "-" * 20_000 + "\n").encode(), 0.0)
    log.close()
    for line in (*log.tail(9), *log.since(0.0)):
        assert len(line) <= 8192
        assert line.endswith(" … (cut)")
        assert secret[:8] not in line
        assert set(line.removesuffix(" … (cut)")) <= {"-", "*"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pulling https://ann:s3cret@hub.local/x", "pulling https://***@hub.local/x"),
        ("s3://AKIAX@bucket and mailto a@b.c", "s3://***@bucket and mailto a@b.c"),
        ("Authorization: Bearer abc.def-12345678", "Authorization: ***"),
        ("{'authorization': 'Basic YTpi', 'x': 1}", "{'authorization': '***', 'x': 1}"),
        ("[(b'authorization', b'Bearer k'), (b'x', b'y')]", "[(b'authorization', b'***'), (b'x', b'y')]"),
        ('{"X-Api-Key": "k k", "Cookie": "a=b; c=d", "z": 1}', '{"X-Api-Key": "***", "Cookie": "***", "z": 1}'),
        ("proxy-authorization: Digest u=1, r=2", "proxy-authorization: ***"),
        ("curl -H bearer abcdefgh1234", "curl -H bearer ***"),
        ("non-default args: {'api_key': ['k1'], 'seed': 3}", "non-default args: {'api_key': ['***'], 'seed': 3}"),
        ("GET /x?access_token=zzz&b=1", "GET /x?access_token=***&b=1"),
        ("hf_" + "a" * 34, "hf_***"),
        ("api_key=None max_tokens=3 eos_token='</s>' KV cache keys: 4", None),
        ("INFO 12-01 04:06:38 [api_server.py:1] Available routes: /v1/models", None),
    ],
)
def test_what_a_line_shows_to_be_secret(text, expected):
    assert Redactor()(text) == (expected or text)


def test_what_is_secret_of_flags_and_variables():
    environment = {
        **{"HF_TOKEN": "hf-one", "AWS_SECRET_ACCESS_KEY": "aws-two", "TOKENIZERS_PARALLELISM": "false", "A": "plain"},
        **{"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20abc,x-team=ml-team", "PASSWORD": ""},
        **{"HTTPS_PROXY": "http://joe:p%40ss@proxy:3128", "HOME": "/root"},
    }
    words = ["--api-key", "key-one", "key-two", "--seed", "3", "--otlp-traces-endpoint=http://u:w0rd@h:1"]
    assert secrets_of(words, environment) == {
        *("hf-one", "aws-two", "Basic abc", "ml-team", "p%40ss", "p@ss", "key-one", "key-two", "w0rd")
    }


def test_other_spellings_of_a_secret():
    value = 'pa"ss\\wörd/1'
    redactor = Redactor([value])
    for text in (value, repr(value), json.dumps(value), urllib.parse.quote(value), urllib.parse.quote(value, "")):
        assert "rd" not in redactor(f"<{text}>")


def test_secrets_that_overlap_and_masks_that_complete_one():
    assert Redactor(["abcd", "cdef"])("xabcdefx") == "x***x"
    assert Redactor(["a***b", "long-one"])("along-oneb") == "***"
    assert Redactor(["****", "abc"])("**** abc") == "**** abc"  # asterisks tell nothing; three characters hide nothing
    assert Redactor(["one-line\nother-line"])("x other-line") == "x ***"


def test_a_logger_named_engine_trusts_only_clean_lines():
    """The engine's records are masked once, before they are kept; what enters there is what the tail shows."""
    told = all_formats(Redactor(["hush-hush"]), lambda: _engine_says(b"hush-hush\n"))
    assert "hush" not in told["json"]
    assert json.loads(told["json"])["logger"] == ENGINE


def _engine_says(data: bytes) -> None:
    log = EngineLog(Redactor(["hush-hush"]), lambda _: None)
    log.feed(data, 0.0)
    log.close()
