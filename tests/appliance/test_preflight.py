"""Checks before a start that need no engine."""

import pytest

from appliance import preflight
from appliance.errors import SettingsError


@pytest.mark.parametrize(
    "word",
    [
        *("--host", "--port=9", "--uds", "--root-path", "--ssl-keyfile", "--ssl_certfile=x", "--ssl-ca-certs"),
        *("--config", "--headless", "--grpc", "--shutdown-timeout", "--ssl-key", "--por"),
    ],
)
def test_flags_that_are_the_appliances_to_decide(word):
    name = word.partition("=")[0].replace("_", "-")
    with pytest.raises(SettingsError, match=f"^engine_args: {name} is the appliance's to decide; accepted: ") as caught:
        preflight.check_engine_args(["--dtype", "half", word, "value"])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("word", ["--api-key", "--api_key=0123456789abcdef", "--hf-token", "--api-k"])
def test_secrets_on_a_command_line_are_refused_and_not_repeated(word):
    with pytest.raises(SettingsError, match="shows a secret to every user; accepted: ") as caught:
        preflight.check_engine_args([word, "0123456789abcdef"])
    assert "0123456789abcdef" not in str(caught.value)


def test_other_flags_pass():
    preflight.check_engine_args(
        ["--enforce-eager", "--max-num-seqs", "8", "--tensor-parallel-size=2", "-O3", "--api-server-count", "1"]
    )


@pytest.mark.parametrize(("mib", "warned"), [(64, True), (1023, True), (1024, False)])
def test_small_shared_memory_is_told_once(monkeypatch, caplog, mib, warned):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"total": mib << 20}))
    preflight.warn_of_shared_memory()
    assert [("shm_size" in text, "ipc: host" in text, str(mib) in text) for text in caplog.messages] == (
        [(True, True, True)] if warned else []
    )


def test_no_shared_memory_at_all_says_nothing(caplog):
    preflight.warn_of_shared_memory("/nowhere")
    assert caplog.messages == []
