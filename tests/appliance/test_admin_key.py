"""Where the command line takes an admin key from, and what an appliance that wants one is told."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from appliance.errors import EngineError
from appliance.host.adminkey import admin_key
from appliance.host.errors import UsageError
from appliance.host.status import fetch

KEY = "k" * 24


@pytest.mark.parametrize("text", [KEY, f"ops:{KEY}\n", f"# ours\n\nops:{KEY}\nother:{'x' * 24}\n"])
def test_the_first_key_of_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    assert admin_key(tmp_path / "keys") == KEY
    assert admin_key(None, {"MJOLNIR_ADMIN_KEY_FILE": str(tmp_path / "keys")}) == KEY
    assert admin_key(None, {}) == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory; accepted: a file with an admin key"),
        (b"# nothing\n", "has no key; accepted: one line with the key, or name:key"),
        (b"ops:sha256:" + b"0" * 64, "has only the key's hash; accepted: a file with the key itself"),
        (b"\xff\xfe", "not text; accepted: a file with an admin key"),
    ],
)
def test_a_file_without_a_key_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        admin_key(path)
    assert str(caught.value) == f"{path}: {said}"


@contextmanager
def guarded(key: str) -> Iterator[str]:
    """A server that answers /status to whoever has the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if right else 401)
            self.end_headers()
            self.wfile.write(b'{"state": "ready"}' if right else b"{}")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_appliance_that_wants_a_key_says_where_to_give_it() -> None:
    with guarded(KEY) as url:
        assert fetch(f"{url}/status", KEY) == {"state": "ready"}
        with pytest.raises(EngineError, match=r"wants an admin key: --admin-key-file or MJOLNIR_ADMIN_KEY_FILE$"):
            fetch(f"{url}/status")
        with pytest.raises(EngineError, match="wants another admin key") as caught:
            fetch(f"{url}/status", "wrong" * 5)
    assert "wrong" not in str(caught.value)
