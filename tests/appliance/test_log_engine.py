"""The engine's lines: taken apart, kept together, held back in a flood."""

import asyncio
import logging
import os
import signal
import sys
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import rootcause
from appliance.command import Launch
from appliance.engine import Engine
from appliance.engine_line import Bar, bar_of, neutralise, parse
from appliance.engine_log import BURST_LINES, LINES_PER_SECOND, EngineLog
from appliance.redaction import Redactor
from appliance.throttle import TokenBucket

CORE = "(EngineCore pid=12) ERROR 12-01 04:06:38 [core.py:99] "
WORKER = "(Worker_TP0 pid=13) INFO 12-01 04:06:39 [gpu.py:1] "


class Told:
    """An engine's log, and what came of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.log = EngineLog(Redactor(), self.lines.append)

    def feed(self, text: str, now: float = 0.0) -> bool:
        held = self.log.feed(text.encode(), now)
        for _ in self.log.steps():
            pass
        return held


@pytest.fixture
def told(caplog) -> Told:
    caplog.set_level(logging.DEBUG)
    return Told()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (CORE + "it broke", ("EngineCore", 12, logging.ERROR, "core.py:99", "it broke")),
        (WORKER + "  two", ("Worker_TP0", 13, logging.INFO, "gpu.py:1", "  two")),
        ("WARNING 12-01 04:06:38 [a/b.py:9] x", ("", None, logging.WARNING, "a/b.py:9", "x")),
        ("(APIServer pid=1) INFO:     Started server process [1]", ("APIServer", 1, logging.INFO, "", None)),
        ("(APIServer pid=1) Traceback (most recent call last):", ("APIServer", 1, logging.ERROR, "", None)),
        ("/x/y.py:12: UserWarning: old", ("", None, logging.WARNING, "", "/x/y.py:12: UserWarning: old")),
        ("[rank0]:[W1201 04:06:38.123 Group.cpp:99] slow", ("", None, logging.WARNING, "", None)),
        ("[E1201 04:06:38.123 Group.cpp:99] gone", ("", None, logging.ERROR, "", None)),
        ("Fatal Python error: Segmentation fault", ("", None, logging.ERROR, "", None)),
        ("ERRORS were few", ("", None, None, "", "ERRORS were few")),
        ("(no process) INFO", ("", None, None, "", "(no process) INFO")),
        ("", ("", None, None, "", "")),
    ],
)
def test_a_line_taken_apart(line, expected):
    found = parse(line)
    *head, text = expected
    assert [found.process, found.pid, found.level, found.source] == head
    assert found.header + found.text == line
    assert text is None or found.text == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link", "red link"),
        ("a\x07b\x08\x00\x7f\x9bc", r"a\x07b\x08\x00\x7f\x9bc"),
        ("\x1b[2J\x1b", r"\x1b"),
        ("tab\tgrün 漢字 ███", "tab\tgrün 漢字 ███"),
        ("evil\u202etxt.exe\u2066 a\u2028b", r"evil\u202etxt.exe\u2066 a\u2028b"),
        ("two\nlines", r"two\x0alines"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(text, expected):
    assert neutralise(text) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=4))
def test_any_bytes_in_any_pieces(data, cuts):
    """However the bytes come, the lines are the same, and none holds what a terminal obeys."""
    pieces = Told()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, stop in pairwise(edges):
        pieces.log.feed(data[start:stop], 0.0)
    pieces.log.close()
    whole = Told()
    whole.log.feed(data, 0.0)
    whole.log.close()
    assert pieces.log.since(0.0) == whole.log.since(0.0)
    assert all(ch == "\t" or ch.isprintable() or not ch.isascii() for line in whole.lines for ch in line)
    assert not any(ch in line for line in whole.lines for ch in "\n\r\x1b\x9b")


def test_tracebacks_are_one_record_each_though_two_processes_write_at_once(told, caplog):
    core = [
        "Engine failed to start.",
        "Traceback (most recent call last):",
        '  File "core.py", line 1',
        "ValueError: x",
    ]
    server = [
        *("Traceback (most recent call last):", '  File "a.py", line 2', "KeyError: 'k'", ""),
        *("During handling of the above exception, another exception occurred:", ""),
        *("Traceback (most recent call last):", "    wait()", "RuntimeError: see above"),
    ]
    lines = [line for pair in zip([CORE + text for text in core], server, strict=False) for line in pair]
    lines += server[len(core) :]
    told.feed("\n".join((*lines, WORKER + "still here", "plain")) + "\n")
    told.log.close()
    records = {record.getMessage(): record for record in caplog.records}
    assert set(records) == {"Engine failed to start.", "RuntimeError: see above", "still here", "plain"}
    failed, server_died = records["Engine failed to start."], records["RuntimeError: see above"]
    assert failed.levelno == server_died.levelno == logging.ERROR
    assert failed.exception.splitlines() == core[1:]
    assert (failed.engine_process, failed.engine_pid, failed.engine_source) == ("EngineCore", 12, "core.py:99")
    assert server_died.exception.splitlines() == [line for line in server if line]
    assert failed._raw == [CORE + text for text in core]
    assert not hasattr(records["plain"], "engine_process")


def test_a_traceback_without_end_is_told_in_parts(told, caplog):
    told.feed("Traceback (most recent call last):\n" + "  frame\n" * 1200)
    told.log.close()
    assert [len(record._raw) for record in caplog.records] == [500, 500, 201]
    assert [getattr(record, "continued", False) for record in caplog.records] == [False, True, True]


def test_an_error_waits_for_its_next_line_and_no_longer(told, caplog):
    assert told.log.patience is None
    told.feed(CORE + "alone\n")
    assert caplog.messages == []
    assert told.log.patience == 0.25
    told.log.idle(0.3)
    assert caplog.messages == ["alone"]
    assert told.log.patience is None
    told.feed("half a li")
    told.log.idle(1.0)
    assert caplog.messages == ["alone"]
    told.feed("ne\n")
    assert caplog.messages == ["alone", "half a line"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Loading safetensors checkpoint shards:  44% Completed | 4/9 [00:02<00:03]",
            Bar("Loading safetensors checkpoint shards:  ", 44),
        ),
        (
            "Capturing CUDA graphs (decode, FULL):  50%|█████     | 12/24",
            Bar("Capturing CUDA graphs (decode, FULL):  ", 50),
        ),
        ("GPU KV cache usage: 50%, hits 3%", None),
        ("x 400%|", None),
    ],
)
def test_progress_bars(line, expected):
    assert bar_of(line) == expected


def test_a_bar_is_shown_at_its_beginning_its_end_and_now_and_then(told, caplog):
    for step in range(101):
        told.feed(f"\rshards: {step}%| | {step}/100", now=step * 0.1)
    told.feed("\r\nother: 3%| |\n", now=10.2)
    assert told.lines[:101] == [f"shards: {step}%| | {step}/100" for step in range(101)]
    assert [message.partition("%")[0] for message in caplog.messages] == [
        *("shards: 0", "shards: 50", "shards: 100", "other: 3")
    ]


def test_a_bucket():
    bucket = TokenBucket(10.0, 3.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(0.1), bucket.take(0.1)] == [True, False]
    assert [bucket.take(9.0, cost=3.0), bucket.take(8.0), bucket.take(9.25)] == [True, False, True]


def test_a_flood_of_one_process_takes_nothing_from_the_others(told, caplog):
    told.feed((WORKER + "again\n") * 5000)
    told.feed(CORE.replace("ERROR", "INFO") + "I am fine\n")
    assert caplog.messages.count("again") == BURST_LINES
    assert caplog.messages[-1] == "I am fine"
    told.log.close()
    dropped = [record.dropped for record in caplog.records if hasattr(record, "dropped")]
    assert sum(dropped) == 3000


def test_every_line_is_told_or_counted_as_dropped(told, caplog):
    for second in range(30):
        told.feed("noise\n" * 3000, now=float(second))
    told.log.close()
    noise, dropped = caplog.messages.count("noise"), [r.dropped for r in caplog.records if hasattr(r, "dropped")]
    assert noise + sum(dropped) == 90_000
    assert noise == BURST_LINES + 29 * LINES_PER_SECOND
    assert len(dropped) <= 30 / 5 + 2
    assert told.log.tail(1)[0].endswith("lines dropped: the engine wrote more than 200 a second")


def test_errors_pass_where_other_lines_do_not(told, caplog):
    flood = WORKER + "x" * 60 + "\n"
    told.feed(flood * 5000)
    frames = "".join(f"(Worker_TP0 pid=13)   File {number}\n" for number in range(40))
    told.feed(flood * 50 + "(Worker_TP0 pid=13) Traceback (most recent call last):\n")
    told.feed(frames)  # without a word that gives an error away
    told.feed("(Worker_TP0 pid=13) OSError: gone\n" + flood * 50)
    told.feed(WORKER.replace("INFO", "ERROR") + "and so is this\n")
    told.log.close()
    failed = next(record for record in caplog.records if record.getMessage() == "OSError: gone")
    assert len(failed.exception.splitlines()) == 42
    assert "and so is this" in caplog.messages
    assert caplog.messages.count("x" * 60) == BURST_LINES


def test_a_flood_of_errors_is_held_back_too(told, caplog):
    told.feed((CORE + "no\n") * 50_000)
    told.log.close()
    assert sum(len(getattr(record, "_raw", [])) for record in caplog.records) == 2 * BURST_LINES
    assert sum(getattr(record, "dropped", 0) for record in caplog.records) == 50_000 - 2 * BURST_LINES


def test_the_cause_of_a_death_is_found_among_lines_that_were_held_back(told):
    trace = "Traceback (most recent call last):\n  File x\nValueError: the cause\n"
    told.feed("ERROR: no\n" * 10_000)
    told.feed(f"{trace}" + "after\n" * 500)
    told.log.close()
    assert "ValueError: the cause" not in told.lines
    assert rootcause.find(told.log.since(0.0)).text == "ValueError: the cause"


def test_processes_without_end_share_one_bucket(told):
    told.feed("".join(f"(P{number} pid={number}) hello\n" for number in range(10_000)))
    told.log.close()
    assert len(told.lines) <= BURST_LINES + 40
    assert sum("lines dropped" in line for line in told.log.tail(1000)) == 1


def test_memory_and_records_are_bounded_in_a_flood(told, caplog):
    caplog.set_level(logging.CRITICAL)
    chunk = (WORKER + "y" * 80 + "\n").encode() * 600
    tracemalloc.start()
    try:
        for number in range(400):  # 30 MB in what is taken for four seconds
            told.log.feed(chunk, number / 100)
            for _ in told.log.steps():
                pass
        told.log.feed(b"z" * (8 << 20), 4.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(told.lines) <= BURST_LINES + 4 * LINES_PER_SECOND
    assert len(told.log.tail(10_000)) <= 1000
    assert 1000 < len(told.log.since(0.0)) <= 4000 + 600
    assert peak < 40 << 20


FLOOD = """
import os, sys
line = b"(Worker pid=13) INFO 12-01 04:06:39 [gpu.py:1] " + b"y" * 60 + b"\\n"
for _ in range(100):
    os.write(2, line * 1000)
os.write(2, b"Traceback (most recent call last):\\n  File x\\nMemoryError: the last words")
os.kill(os.getpid(), 9)
"""


async def test_a_hundred_thousand_lines_and_the_last_words(tmp_path, caplog):
    """Killed without a line's end, right after a flood: what it wrote last is there, and no request had to wait."""
    caplog.set_level(logging.INFO)
    engine = Engine(Launch((sys.executable, "-c", FLOOD), dict(os.environ), tmp_path / "s"), 5.0, lambda _: None)
    await engine.start()
    turns = 0
    ended = asyncio.ensure_future(engine.wait())
    while not ended.done():
        turns += 1
        await asyncio.sleep(0)
    assert ended.result() == 128 + signal.SIGKILL
    assert turns > 100  # others had their turn again and again
    assert rootcause.find(engine.log_since(60.0)).text == "MemoryError: the last words"
    assert engine.tail(4)[-2:] != []
    assert "MemoryError: the last words" in engine.tail(10)
    noise = sum(message == "y" * 60 for message in caplog.messages)
    assert noise + sum(getattr(record, "dropped", 0) for record in caplog.records) == 100_000
    assert noise < 20_000


async def test_what_is_unfinished_when_the_reader_is_stopped_is_told(tmp_path):
    """A process outside our reach keeps the pipe open: its reader is stopped, and has told what it had."""
    code = "import os, subprocess, sys; os.write(2, b'half a line'); os.kill(os.getppid(), 9)"
    engine = Engine(Launch((sys.executable, "-c", code), dict(os.environ), tmp_path / "s"), 5.0, lambda _: None)
    await engine.start()
    assert await engine.wait() == 128 + signal.SIGKILL
    assert engine.tail(1) == ["half a line"]
