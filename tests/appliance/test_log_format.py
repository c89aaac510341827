"""Text and JSON, as an operator's collector gets them."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
import threading

import pytest

from appliance import settings
from appliance.errors import SettingsError
from appliance.log import JsonLines, Redactor, TextLines, logging_to
from appliance.terminal import Terminal
from tests.appliance.conftest import FAKE

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def written(formatter: logging.Formatter, say, level: str = "debug", redactor: Redactor | None = None) -> list[str]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    with logging_to(handler, level, redactor or Redactor()):
        say(logging.getLogger("appliance.x"))
    return out.getvalue().splitlines()


def test_json_is_one_object_a_line_with_its_fields():
    def say(log: logging.Logger) -> None:
        log.info("two\nlines %d", 3, extra={"state": "ready", "seconds": 1.5, "key": None, "odd": {"a": object}})
        try:
            raise OSError("gone\nfor good")
        except OSError:
            log.exception("it failed")

    first, second = map(json.loads, written(JsonLines(), say))
    assert list(first)[:4] == ["time", "level", "logger", "message"]
    assert TIME.fullmatch(first["time"])
    assert (first["level"], first["logger"], first["message"]) == ("info", "appliance.x", r"two\x0alines 3")
    assert (first["state"], first["seconds"], first["key"], type(first["odd"])) == ("ready", 1.5, None, str)
    assert second["message"] == "it failed"
    assert second["exception"].startswith("Traceback (most recent call last):\n")
    assert second["exception"].endswith("OSError: gone\nfor good")
    assert set(second) == {"time", "level", "logger", "message", "exception"}


def test_text_is_one_line_a_message():
    lines = written(TextLines(), lambda log: log.warning("two\nlines \x1b[2J", extra={"state": "ready"}))
    assert [re.sub(r"^\S+ \S+", "T", line) for line in lines] == [r"T WARNING appliance.x two\x0alines "]


class Stuck(logging.Handler):
    """A terminal stopped with Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()
        self.records: list[logging.LogRecord] = []

    def emit(self, record):
        self.reached.set()
        self.go.wait(10)  # for a test that fails before it lets go
        self.records.append(record)


@pytest.mark.parametrize(("size", "count"), [(10, 12_000), (20_000, 600)])
def test_a_log_that_nobody_reads_is_bounded_and_drops_infos_first(size, count):
    handler = Stuck()
    log = logging.getLogger("appliance.x")
    with logging_to(handler, "info", Redactor()):
        log.info("first")
        assert handler.reached.wait(10)
        for _ in range(count):
            log.info("x" * size)
        log.warning("40 lines dropped", extra={"dropped": 40})
        log.error("it broke")
        held = sum(getattr(record, "_size", 0) for record in list(logging.getLogger().handlers[-1].queue.queue))
        for _ in range(count):
            log.warning("40 lines dropped " + "y" * size, extra={"dropped": 40})
        handler.go.set()
    infos = sum(record.levelno == logging.INFO for record in handler.records) - 1
    dropped = sum(getattr(record, "dropped", 0) for record in handler.records)
    assert held <= (8 << 20) + 2 * (2 * size + 1024)
    assert any(record.getMessage() == "it broke" for record in handler.records)
    # Counts of what was dropped before are in the last word, whatever became of the messages that told them.
    assert infos + dropped == count + 40 + count * 40
    assert infos <= 8_000
    assert handler.records[-1].getMessage().endswith("nobody read them")


@pytest.mark.parametrize(("given", "kind"), [(None, TextLines), ("text", TextLines), ("json", JsonLines)])
def test_what_is_written_where_there_is_no_terminal(given, kind):
    handler = Terminal("info", given).log_handler()
    with logging_to(handler, "info", Redactor()):
        assert type(handler.formatter) is kind


def test_settings_and_their_errors(monkeypatch):
    monkeypatch.setenv("MJOLNIR_LOG_FORMAT", "JSON")
    monkeypatch.setenv("MJOLNIR_ACCESS_LOG", "off")
    assert (settings.load().log_format, settings.load().access_log) == ("json", False)
    assert settings.load(log_format="text").log_format == "text"
    monkeypatch.setenv("MJOLNIR_LOG_FORMAT", "xml")
    with pytest.raises(SettingsError, match=r"^log_format='xml': accepted: 'text' or 'json' \(--log-format or MJ"):
        settings.load()


def started(model, tmp_path, *flags: str, ours: tuple[str, ...] = ()) -> subprocess.Popen:
    words = [sys.executable, "-m", "appliance.cli", "serve", "--model", model, "--port", "0", "--log-format", "json"]
    words += ["--cache-dir", tmp_path / "cache", "--stats-dir", tmp_path / "stats", *ours, "--", *flags]
    environment = {
        **settings.os.environ,
        "SOME_TOKEN": "tops3cret",
        **{"MJOLNIR_ENGINE_COMMAND": f"{sys.executable} {FAKE}", "MJOLNIR_BACKOFF_SECONDS": "0.05"},
    }
    return subprocess.Popen(list(map(str, words)), env=environment, stderr=subprocess.PIPE, text=True)


def test_every_line_of_a_whole_run_is_json(model, tmp_path):
    records = []
    with started(model, tmp_path, "--secret", "tops3cret") as process:
        for line in process.stderr:
            records.append(json.loads(line))
            if records[-1]["message"].startswith("ready after"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    by_message = {record["message"]: record for record in records}
    ready = next(record for record in records if record["message"].startswith("ready after"))
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", ready["url"])
    assert ready["seconds"] > 0
    states = [record["state"] for record in records if "state" in record]
    assert states[0] == "starting"
    assert states[-2:] == ["draining", "stopped"]
    resolved = by_message["Resolved architecture: FakeForCausalLM"]
    assert {name: resolved[name] for name in ("level", "logger", "engine_process", "engine_pid", "engine_source")} == {
        **{"level": "info", "logger": "engine"},
        **{"engine_process": "APIServer", "engine_pid": 10, "engine_source": "model.py:733"},
    }
    assert "non-default args: api_key=***" in by_message
    assert all(TIME.fullmatch(record["time"]) for record in records)


def test_a_failed_start_is_json_to_the_last_word(model, tmp_path):
    with started(model, tmp_path, "--fail-start", "ValueError: max_model_len is too large") as process:
        *_, last = records = [json.loads(line) for line in process.stderr]
    assert process.returncode == 1
    failed = next(record for record in records if record["message"] == "WorkerProc failed to start.")
    assert failed["level"] == "error"
    assert failed["exception"].splitlines()[-1] == "ValueError: max_model_len is too large"
    assert len(failed["exception"].splitlines()) == 4
    assert next(record for record in records if "cause" in record)["cause"] == "bad_flag"
    assert (last["level"], last["exit_code"]) == ("critical", 1)
    assert "max_model_len is too large" in last["message"]
