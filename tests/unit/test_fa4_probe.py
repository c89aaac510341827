"""The probe of FlashAttention 4 from the engine's side: whom it serves, the child process, and the kept verdict.

The child is replaced by small programs that answer, crash or hang; what the real one does with tensors is in
test_fa4_child.py.
"""

import fcntl
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mjolnir import fa4_probe
from mjolnir.errors import ConfigurationError
from mjolnir.fa4_probe import Verdict

IDENTITY = {"driver": "580.1", "torch": "2.13.0+cu130", "vllm": "0.32.0", "architecture": "11.0", "sources": "abc"}
PASSED = 'print(\'THOR FA4 verdict {"passed": true, "detail": "12 steps", "lasting": true}\')'


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the verdicts; a process that has asked nothing yet."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv(fa4_probe.KERNELS_VARIABLE, "to be restored")
    monkeypatch.delenv(fa4_probe.KERNELS_VARIABLE)
    monkeypatch.setattr(fa4_probe, "identity", lambda: dict(IDENTITY))
    monkeypatch.setattr(fa4_probe, "_config", lambda: None)
    monkeypatch.setattr(fa4_probe, "time", SimpleNamespace(monotonic=lambda: 0.0))
    forget()
    yield tmp_path / "mjolnir" / "fa4"
    forget()


def forget() -> None:
    """As a new process."""
    fa4_probe.verdict.cache_clear()
    fa4_probe._tell.cache_clear()


class Child:
    """Stands in for the child process: what it answers, and with what it was called."""

    def __init__(self) -> None:
        self.answer, self.calls = Verdict(True, "12 steps"), []

    def __call__(self, head_size: int, pages: tuple[int, ...]) -> Verdict:
        self.calls.append((head_size, pages))
        return self.answer


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    child = Child()
    monkeypatch.setattr(fa4_probe, "run_child", child)
    return child


def model(head_size: int, dtype: str, block_size: int | None = None) -> Any:
    cache = SimpleNamespace(cache_dtype=dtype, block_size=block_size or 16, user_specified_block_size=bool(block_size))
    return SimpleNamespace(model_config=SimpleNamespace(get_head_size=lambda: head_size), cache_config=cache)


# Whom it serves.


@pytest.mark.parametrize(
    ("question", "probed", "answers"),
    [
        ({"head_size": 128}, [(128, (16, 128))], (True, False)),
        ({"head_size": 64, "fp8": True}, [(64, (16, 128))], (True, False)),
        ({"head_size": 128, "head_size_v": 128}, [(128, (16, 128))], (True, False)),
        ({}, [(128, (16, 128))], (True, False)),
        ({"head_size": 256}, [(256, (128,))], (True, False)),
        ({"head_size": 256, "fp8": True}, [], (False, False)),
        ({"head_size": 96}, [], (False, False)),
        ({"head_size": 192}, [], (False, False)),
        ({"head_size": 128, "head_size_v": 64}, [], (False, False)),
    ],
)
def test_what_is_probed_and_what_follows(
    child: Child, question: dict[str, Any], probed: list[Any], answers: tuple[bool, bool]
) -> None:
    assert fa4_probe.usable(**question) is answers[0]
    assert child.calls == probed
    (folder := fa4_probe.folder()).mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.json"):
        file.unlink()
    forget()
    child.answer = Verdict(False, "NaN")
    assert fa4_probe.usable(**question) is answers[1]


@pytest.mark.parametrize(
    ("config", "probed"),
    [
        (model(64, "fp8"), [(64, (16, 128))]),
        (model(64, "fp8", block_size=32), [(64, (32, 128))]),
        (model(64, "fp8", block_size=128), [(64, (128,))]),
        (model(64, "auto", block_size=100), [(64, (16, 128))]),
        (model(256, "auto"), [(256, (128,))]),
        (model(256, "fp6_e2m3"), [(256, (128,))]),  # expanded to bf16 pages for the fallback
        (model(256, "fp8"), []),
    ],
)
def test_the_models_head_size_and_page_are_probed(
    child: Child, monkeypatch: pytest.MonkeyPatch, config: Any, probed: list[Any]
) -> None:
    monkeypatch.setattr(fa4_probe, "_config", lambda: config)
    assert fa4_probe.usable() is bool(probed)
    assert child.calls == probed


@pytest.mark.parametrize(("setting", "answer"), [("off", False), ("on", True)])
def test_a_setting_spares_the_probe(child: Child, monkeypatch: pytest.MonkeyPatch, setting: str, answer: bool) -> None:
    monkeypatch.setenv("MJOLNIR_ATTN_FA4", setting)
    assert fa4_probe.usable(128, fp8=True) is answer
    assert not fa4_probe.usable(256, fp8=True), "no setting gives that kernel descales"
    assert child.calls == []


def test_a_setting_that_is_none(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MJOLNIR_ATTN_FA4", "maybe")
    with pytest.raises(ConfigurationError, match=r"^MJOLNIR_ATTN_FA4='maybe': accepted: .*auto"):
        fa4_probe.usable(128)


def test_each_result_is_logged_once(child: Child, backend_log: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        fa4_probe.usable(64)
        fa4_probe.usable(256, fp8=True)
    child.answer = Verdict(False, "long decodes, fp8, page 16: relative error 0.7, accepted below 0.05")
    for _ in range(2):
        fa4_probe.usable(128, fp8=True)
    runs = "runs, once on this device; compiling takes a minute or more"
    assert [(record.levelname, record.getMessage()) for record in backend_log.records] == [
        ("INFO", f"THOR FA4 64 probe: {runs}"),
        ("INFO", "THOR FA4 64 probe: passed: 12 steps, 0 s"),
        (
            "INFO",
            "THOR FA4 256 probe: not run: the kernel for this head size takes no descales, so no fp8 KV cache; "
            "an fp8 KV cache is for FLASHINFER, else TRITON_ATTN",
        ),
        ("INFO", f"THOR FA4 128 probe: {runs}"),
        (
            "INFO",
            "THOR FA4 128 probe: failed: long decodes, fp8, page 16: relative error 0.7, accepted below 0.05, 0 s; "
            "an fp8 KV cache is for FLASHINFER, else TRITON_ATTN",
        ),
    ]


@pytest.mark.parametrize("given", [None, "/srv/kernels"])
def test_compiled_kernels_get_a_lasting_place(
    child: Child, place: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given:
        monkeypatch.setenv(fa4_probe.KERNELS_VARIABLE, given)
    fa4_probe.usable(128)
    assert os.environ[fa4_probe.KERNELS_VARIABLE] == (given or str(place / "kernels"))


# The kept verdict.


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_is_kept_for_the_next_process(child: Child, place: Path, passed: bool) -> None:
    child.answer = Verdict(passed, "as found")
    first = fa4_probe.verdict(128, (16, 128))
    forget()
    assert fa4_probe.verdict(128, (16, 128)) == first
    assert len(child.calls) == 1
    (file,) = place.glob("*.json")
    told = {"passed": passed, "detail": f"{'passed' if passed else 'failed'}: as found, 0 s", "lasting": True}
    key = IDENTITY | {"head_size": "128", "pages": "16, 128"}
    assert json.loads(file.read_text()) == {"format": "mjolnir.fa4_verdict/1", "key": key, "verdict": told}
    assert sorted(path.name for path in place.iterdir()) == [file.name, "lock"], "nothing half-written is left"


@pytest.mark.parametrize("name", IDENTITY)
def test_anything_new_in_the_machine_is_probed_again(child: Child, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fa4_probe.verdict(128, (128,))
    forget()
    monkeypatch.setattr(fa4_probe, "identity", lambda: IDENTITY | {name: "another"})
    fa4_probe.verdict(128, (128,))
    assert len(child.calls) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "\udcff",
        lambda text: text.replace('"passed": true', '"passed": "true"'),
        lambda text: text.replace("verdict/1", "verdict/2"),
        lambda text: text.replace("580.1", "590.1"),
        lambda text: text.replace('"detail"', '"details"'),
    ],
)
def test_a_damaged_file_is_probed_again_and_mended(child: Child, place: Path, damage: Any) -> None:
    fa4_probe.verdict(128, (128,))
    (file,) = place.glob("*.json")
    whole = file.read_text()
    file.write_bytes(damage(whole).encode(errors="surrogateescape"))
    forget()
    assert fa4_probe.verdict(128, (128,)).passed
    assert len(child.calls) == 2
    assert file.read_text() == whole


def test_what_may_pass_is_not_kept(child: Child, place: Path) -> None:
    child.answer = Verdict(False, "no CUDA device", lasting=False)
    fa4_probe.verdict(128, (128,))
    assert list(place.glob("*.json")) == []
    forget()
    fa4_probe.verdict(128, (128,))
    assert len(child.calls) == 2


def test_a_place_that_can_not_be_used_does_not_stop_the_probe(
    child: Child, tmp_path: Path, backend_log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mjolnir").write_text("a file where a folder should be")
    assert fa4_probe.verdict(128, (128,)).passed
    assert any("can't be used, so the verdict is not kept: " in record.getMessage() for record in backend_log.records)


PROCESS = f"""
import sys
from pathlib import Path
from mjolnir import fa4_probe
fa4_probe.identity = lambda: {IDENTITY!r}

def run_child(head_size, pages):
    with open(sys.argv[1], "a") as calls:
        calls.write("probed\\n")
    Path(sys.argv[2]).write_text("")
    print("probing", flush=True)
    sys.stdin.readline()
    return fa4_probe.Verdict(True, "12 steps")

fa4_probe.run_child = run_child
print(fa4_probe.verdict(128, (128,)).detail, flush=True)
"""


def test_two_processes_probe_once(tmp_path: Path) -> None:
    """The second waits for the first and reads what that kept; which is which does not matter."""
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "calls"), str(tmp_path / "mark")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "probing\n"
        with subprocess.Popen(command, **pipes) as second:
            # It is at the lock, or will be: either way it must not probe while the first one does.
            answer, _ = first.communicate("go on\n", timeout=60)
            kept, _ = second.communicate("go on\n", timeout=60)
    assert kept == answer
    assert re.fullmatch(r"passed: 12 steps, \d+ s\n", answer)
    assert (tmp_path / "calls").read_text() == "probed\n"


def test_the_lock_is_held_while_the_child_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: Any) -> Verdict:
        with (place / "lock").open() as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Verdict(True, "12 steps")

    monkeypatch.setattr(fa4_probe, "run_child", taken)
    assert fa4_probe.verdict(128, (128,)).passed
    with (place / "lock").open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


# The child process.


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a program the child: the interpreter is replaced by one that runs it with the child's arguments."""

    def make(text: str) -> None:
        file = tmp_path / "interpreter"
        file.write_text(f"#!{sys.executable}\nimport os, signal, sys, time\n{text}\n")
        file.chmod(0o755)
        monkeypatch.setattr(fa4_probe.sys, "executable", str(file))

    return make


def test_the_childs_verdict_is_taken(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    names = '("PYTHONPATH", "MJOLNIR_ATTN_FA4", "VLLM_PLUGINS")'
    report = f"open({str(tmp_path / 'told')!r}, 'w').write(repr((sys.argv[1:], [os.environ[n] for n in {names}])))"
    program(f"print('INFO a line of vLLM')\n{report}\n{PASSED}")
    assert fa4_probe.run_child(128, (16, 128)) == Verdict(True, "12 steps")
    source = str(Path(fa4_probe.__file__).parents[1])
    arguments = ["-P", "-m", "mjolnir.fa4_child", "128", "16", "128"]
    assert (tmp_path / "told").read_text() == repr((arguments, [f"{source}:/elsewhere", "off", ""]))


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", Verdict(False, "ended by SIGSEGV")),
        ("os.kill(os.getpid(), signal.SIGABRT)", Verdict(False, "ended by SIGABRT")),
        ("os.kill(os.getpid(), signal.SIGKILL)", Verdict(False, "ended by SIGKILL", lasting=False)),
        ("os.kill(os.getpid(), signal.SIGTERM)", Verdict(False, "ended by SIGTERM", lasting=False)),
        ("raise RuntimeError('bad code')", Verdict(False, "ended with code 1: RuntimeError: bad code")),
        ("pass", Verdict(False, "ended with code 0: nothing on stderr")),
        (f"{PASSED}; os._exit(3)", Verdict(False, "ended with code 3: nothing on stderr")),
        (f"{PASSED}; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGSEGV)", Verdict(False, "ended by SIGSEGV")),
    ],
)  # fmt: skip
def test_a_child_that_fails_is_a_failed_probe(program: Any, text: str, verdict: Verdict) -> None:
    program(text)
    assert fa4_probe.run_child(128, (128,)) == verdict


def test_a_child_that_hangs_is_ended_with_all_it_started(program: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program(
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nstream = open({str(fifo)!r}, 'w'); os.fork(); signal.pause()"
    )
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert fa4_probe.run_child(128, (128,), seconds=2.0) == Verdict(False, "no answer within 2 s")
        assert select.select([reader], [], [], 30)[0], "a writer still lives"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_an_interpreter_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4_probe.sys, "executable", "/nonexistent/python")
    wanted = Verdict(False, "can't be started: No such file or directory", lasting=False)
    assert fa4_probe.run_child(128, (128,)) == wanted


def test_asking_initialises_nothing() -> None:
    """The API server asks too, and it must neither import torch for this nor touch CUDA."""
    code = (
        "import sys\nfrom mjolnir import fa4_probe\n"
        "fa4_probe.identity = dict\nfa4_probe._config = lambda: None\n"
        "fa4_probe.run_child = lambda *_: fa4_probe.Verdict(True, '')\n"
        "assert fa4_probe.usable(128, fp8=True)\nprint('torch' in sys.modules, 'vllm' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


def test_the_identity_tells_everything_it_must(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import vllm.platforms

    monkeypatch.undo()
    capability = SimpleNamespace(major=11, minor=0)
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(get_device_capability=lambda: capability))
    cute = tmp_path / "vllm_flash_attn" / "cute"
    cute.mkdir(parents=True)
    (init := tmp_path / "vllm_flash_attn" / "__init__.py").touch()
    (cute / "interface.py").write_text("one")
    monkeypatch.setattr(fa4_probe.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(init)))
    found = fa4_probe.identity()
    assert set(found) == {"driver", "torch", "vllm", "cutlass_dsl", "architecture", "sources"}
    assert found["architecture"] == "11.0"
    assert found["torch"].startswith("2.")
    assert fa4_probe.identity() == found
    (cute / "interface.py").write_text("two")
    assert fa4_probe.identity()["sources"] != found["sources"]


def test_by_hand(child: Child, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fa4_probe.main([]) == 0
    assert capsys.readouterr().out == (
        "THOR FA4 64 probe: passed: 12 steps, 0 s\nTHOR FA4 128 probe: passed: 12 steps, 0 s\n"
    )
    forget()
    child.answer = Verdict(False, "NaN")
    assert fa4_probe.main(["64"]) == 0, "kept"
    forget()
    assert fa4_probe.main(["--again", "64"]) == 1
    assert [head_size for head_size, _ in child.calls] == [64, 128, 64]
    with pytest.raises(SystemExit):
        fa4_probe.main(["96"])
    assert "head_size 96: accepted: 64, 128, 256" in capsys.readouterr().err
