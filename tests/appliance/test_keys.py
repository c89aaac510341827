import asyncio
import base64
import hashlib
import hmac
import logging
import os

import pytest

from appliance import keys
from appliance.errors import SettingsError
from appliance.keys import Gate, KeyRing, build_gate, is_loopback, parse

ONE, TWO = "first-key-0123456789", "other-key-0123456789"


def ring(tmp_path, text, mode=0o600):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return KeyRing(path, "api_keys_file")


def bearer(key, scheme="Bearer"):
    return [(b"authorization", f"{scheme} {key}".encode())]


def test_plain_and_hashed_keys(tmp_path):
    hashed = hashlib.sha256(TWO.encode()).hexdigest()
    found = ring(tmp_path, f"# people\n\nann:{ONE}\n bob:sha256:{hashed.upper()} \n")
    assert [found.name_of(key.encode()) for key in (ONE, TWO, ONE + "x", "", hashed)] == ["ann", "bob", *[None] * 3]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no key in it"),
        ("# only\n", "there is no key in it"),
        ("no-colon-secret\n", "line 1 has no key of 16 to 512"),
        (f"a:{ONE}\n{ONE} x:secret\n", "line 2 does not begin with a name"),
        ("a:sha256:abc\n", "line 1 has no 64 hex digits"),
        ("a:short\n", "line 1 has no key of 16 to 512"),
        (f"a:{ONE} {TWO}\n", "line 1 has no key"),
    ],
)
def test_a_line_that_is_no_key_is_named_by_its_number_only(text, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        parse(text)
    assert "secret" not in str(caught.value)


def test_every_key_is_compared_in_constant_time(tmp_path, monkeypatch):
    """A comparison with == tells by its time how much was right; stopping at the first match, which key it was."""
    found = ring(tmp_path, f"a:{ONE}\nb:{TWO}\n")
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda x, y: compared.append((len(x), len(y))) or real(x, y))
    assert found.name_of(ONE.encode()) == "a"
    assert found.name_of(b"wrong") is None
    assert compared == [(32, 32)] * 4


async def test_a_changed_file_is_taken_and_a_bad_one_is_not(tmp_path, caplog):
    found, path = ring(tmp_path, f"a:{ONE}\n"), tmp_path / "keys"
    path.write_text(f"b:{TWO}\n")
    assert await found.refresh()
    assert (found.name_of(ONE.encode()), found.name_of(TWO.encode())) == (None, "b")
    for bad in ("", "b:short", "\xff\0", f"b:{ONE}\nbroken"):
        path.write_text(bad, encoding="latin-1")
        caplog.clear()
        assert not await found.refresh()
        assert not await found.refresh()
        assert len(caplog.records) == 1
        assert found.name_of(TWO.encode()) == "b"
        assert found.name_of(ONE.encode()) is found.name_of(b"") is None
    path.unlink()
    assert not await found.refresh()
    assert found.name_of(TWO.encode()) == "b"
    assert ONE not in caplog.text


async def test_a_file_that_was_replaced_with_the_same_size_and_time_is_seen(tmp_path):
    found, path = ring(tmp_path, f"a:{ONE}\n"), tmp_path / "keys"
    os.utime(path, ns=(1, 1))
    await found.refresh()
    other = tmp_path / "new"
    other.write_text(f"a:{TWO}\n")
    os.utime(other, ns=(1, 1))
    other.replace(path)
    assert await found.refresh()
    assert found.name_of(TWO.encode()) == "a"


async def test_an_unchanged_file_is_not_read_again(tmp_path, monkeypatch):
    found, path = ring(tmp_path, f"a:{ONE}\n"), tmp_path / "keys"
    os.utime(path, ns=(1, 1))
    await found.refresh()
    monkeypatch.setattr(found, "_read", lambda: pytest.fail("read again"))
    assert not await found.refresh()


async def test_reading_does_not_hold_up_the_loop(tmp_path, monkeypatch):
    found = ring(tmp_path, f"a:{ONE}\n")
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow():
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)

    monkeypatch.setattr(found, "_read_if_changed", slow)
    refresh = asyncio.create_task(found.refresh())
    loop.call_soon(release.set)
    assert await asyncio.wait_for(refresh, 10) is False


def test_a_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="not a regular file"):
        KeyRing(tmp_path / "pipe", "api_keys_file")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_read_is_warned_of(tmp_path, caplog, mode, warned):
    with caplog.at_level(logging.WARNING):
        ring(tmp_path, f"a:{ONE}\n", mode)
    assert ("others may read it" in caplog.text) is warned


def test_credentials(tmp_path):
    gate = Gate(ring(tmp_path, f"ann:{ONE}\n"))
    assert gate.client(bearer(ONE)) == gate.client(bearer(ONE, "bEARER")) == "ann"
    basic = base64.b64encode(f"x:{ONE}".encode()).decode()
    for headers in (
        [],
        bearer(TWO),
        bearer(""),
        bearer(ONE) * 2,
        bearer(basic, "Basic"),
        [(b"authorization", b"\xff")],
    ):
        assert gate.client(headers) is None
    assert Gate().client([]) == ""


def test_a_browsers_password_counts_for_what_changes_nothing(tmp_path):
    gate = Gate(None, ring(tmp_path, f"op:{ONE}\n"))
    basic = bearer(base64.b64encode(f"x:{ONE}".encode()).decode(), "Basic")
    assert gate.admin(basic, safe=True)
    assert not gate.admin(basic, safe=False)
    assert gate.admin(bearer(ONE), safe=False)
    assert not gate.admin(bearer("%%%", "Basic"), safe=True)


def test_the_network_is_not_served_without_keys(tmp_path):
    for address in ("0.0.0.0", "::", "192.168.1.5"):
        with pytest.raises(SettingsError, match="without API keys; accepted: ") as caught:
            build_gate(None, None, address, allow_anonymous=False)
        assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)
        build_gate(None, None, address, allow_anonymous=True)
    build_gate(None, None, "127.0.0.1", allow_anonymous=False)
    ring(tmp_path, f"a:{ONE}\n")
    build_gate(tmp_path / "keys", None, "::", allow_anonymous=False)


@pytest.mark.parametrize(("address", "own"), [("127.9.9.9", True), ("::1", True), ("::", False), ("10.0.0.1", False)])
def test_loopback(address, own):
    assert is_loopback(address) is own
