"""The counters file: what is written is what another process reads, whatever state either of them is in."""

import contextlib
import errno
import json
import mmap
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjolnir import counters
from mjolnir.counters import COUNTERS, CounterFile, GroupInfo, Snapshot, read, read_all
from mjolnir.errors import CounterFileError
from mjolnir.names import FallbackReason, KernelSource, StepKind

FILE_BYTES = 32768
GROUP = GroupInfo("model.layers.0.attn (2 layers)", "fp8", 128, 16, "TORCH_REF")


@pytest.fixture
def written(tmp_path):
    file = CounterFile(tmp_path / "stats", rank=3)
    assert file.path is not None
    yield file
    file.close()


def test_counts_arrive_under_their_names(written):
    written.t5_step(StepKind.DECODE, 3)
    written.t5_step(StepKind.DECODE, 4)
    written.t5_step(StepKind.VERIFY, 8)
    written.fallback_step(FallbackReason.PREFILL, 100)
    written.kernels(KernelSource.COMPILED, 5)
    written.kernels(KernelSource.LOADED)
    counted = {name: number for name, number in read(written.path).counters.items() if number}
    assert counted == {
        "t5:decode": 2,
        "t5:verify": 1,
        "t5_tokens": 15,
        "fallback:prefill": 1,
        "fallback_tokens": 100,
        "kernels:compiled": 5,
        "kernels:loaded": 1,
    }


@pytest.mark.parametrize("kind", StepKind)
def test_each_kind_of_step_has_its_counter(written, kind):
    written.t5_step(kind, 0)
    assert {name for name, number in written.snapshot().counters.items() if number} == {f"t5:{kind}"}


@pytest.mark.parametrize("reason", FallbackReason)
def test_each_reason_has_its_counter(written, reason):
    written.fallback_step(reason, 0)
    assert {name for name, number in written.snapshot().counters.items() if number} == {f"fallback:{reason}"}


def test_order_of_the_counters_is_the_layout_of_version_1():
    """A reader of another build must find every counter where it was: append, never reorder."""
    assert COUNTERS == (
        "t5:decode",
        "t5:verify",
        "t5:noncausal",
        "t5:draft",
        "fallback:prefill",
        "fallback:mixed",
        "fallback:q_len",
        "fallback:non_uniform",
        "fallback:causal_tensor",
        "fallback:batch",
        "fallback:context_parallel",
        "fallback:draft",
        "fallback:ineligible",
        "fallback:disabled",
        "kernels:compiled",
        "kernels:loaded",
        "t5_tokens",
        "fallback_tokens",
        "t5:split",
    )


def test_split_step_is_one_step_with_tokens_on_both_sides(written):
    before = time.time_ns()
    written.split_step(5, 300)
    written.split_step(4, 0)
    snapshot = written.snapshot()
    counts = {name: number for name, number in snapshot.counters.items() if number}
    assert counts == {"t5:split": 2, "t5_tokens": 9, "fallback_tokens": 300}
    assert snapshot.last_step_ns >= before


def test_bytes_are_where_the_module_says(written):
    before = time.time_ns()
    written.t5_step(StepKind.VERIFY, 7)
    written.set_groups([GROUP])
    data = written.path.read_bytes()
    assert len(data) == FILE_BYTES
    assert data[:8] == b"MJOLNIR\n"
    version, pid, start_ticks = struct.unpack_from("<QQQ", data, 8)
    assert (version, pid) == (1, os.getpid())
    assert start_ticks == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert data[32:48].hex() == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    rank, created, last_step, sequence, length = struct.unpack_from("<QQQQQ", data, 48)
    assert rank == 3
    assert before - 10**10 < created <= before <= last_step <= time.time_ns()
    assert sequence == 2
    assert struct.unpack_from("<64Q", data, 128)[COUNTERS.index("t5:verify")] == 1
    assert json.loads(data[1024 : 1024 + length]) == [
        {
            "group": "model.layers.0.attn (2 layers)",
            "kv_format": "fp8",
            "head_size": 128,
            "page_size": 16,
            "fallback": "TORCH_REF",
            "reason": "",
        }
    ]


def test_last_step_moves_with_steps_of_both_kinds_only(written):
    assert read(written.path).last_step_ns == 0
    written.kernels(KernelSource.COMPILED)
    assert read(written.path).last_step_ns == 0
    written.t5_step(StepKind.DECODE, 1)
    first = read(written.path).last_step_ns
    assert first > 0
    written.fallback_step(FallbackReason.MIXED, 1)
    assert read(written.path).last_step_ns > first


def test_identity_and_rank(written):
    snapshot = read(written.path)
    assert snapshot.identity == (os.getpid(), counters.process_start_ticks(os.getpid()), counters.boot_id())
    assert snapshot.rank == 3
    assert snapshot.is_alive()
    assert written.path.name.startswith(f"{os.getpid()}-")
    assert written.path.suffix == ".counters"


def test_only_its_owner_can_read_it(written):
    """Also under an open umask."""
    old = os.umask(0)
    try:
        other = CounterFile(written.path.parent.parent / "other")
    finally:
        os.umask(old)
    assert stat.S_IMODE(other.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(other.path.parent.stat().st_mode) == 0o700
    other.close()


def test_two_files_of_one_process_do_not_meet(tmp_path):
    first, second = CounterFile(tmp_path), CounterFile(tmp_path)
    first.t5_step(StepKind.DECODE, 1)
    assert first.path != second.path
    assert second.snapshot().counters["t5:decode"] == 0
    first.close()
    second.close()


def test_closing_leaves_the_file(tmp_path):
    file = CounterFile(tmp_path)
    file.t5_step(StepKind.DECODE, 1)
    file.close()
    assert read(file.path).counters["t5:decode"] == 1


# Another process writes.

# A token count whose two halves are equal: half of a count, from before or after a store, would not be a multiple.
TOKENS = 2**32 + 1

CHILD = """
import sys
from mjolnir.counters import CounterFile, GroupInfo
from mjolnir.names import StepKind

file = CounterFile(sys.argv[1], rank=1)
tables = [[GroupInfo("g" * size, "fp8", 64, 16, "TORCH_REF")] * size for size in (1, 40)]
print(file.path, flush=True)
for step in range(int(sys.argv[2])):
    file.t5_step(StepKind.DECODE, int(sys.argv[3]))
    file.set_groups(tables[step % 2])
print("done", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def child(directory: Path, steps: int):
    """A process that counts ``steps`` steps, says so and then waits to be closed."""
    command = [sys.executable, "-c", CHILD, str(directory), str(steps), str(TOKENS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.communicate(timeout=60)


def test_reading_while_another_process_writes(tmp_path):
    steps = 4_000
    tables = {
        (),
        (GroupInfo("g", "fp8", 64, 16, "TORCH_REF"),),
        (GroupInfo("g" * 40, "fp8", 64, 16, "TORCH_REF"),) * 40,
    }
    seen: list[Snapshot] = []
    with child(tmp_path, steps) as (process, path):
        while not seen or seen[-1].counters["t5:decode"] < steps:
            assert process.poll() is None
            seen.append(read(path))
        assert process.stdout.readline() == "done\n"
        final = read(path)
        assert final.is_alive()
    counted = [snapshot.counters["t5:decode"] for snapshot in seen]
    assert len(set(counted)) > 10  # it did read in the middle
    assert counted == sorted(counted)
    tokens = [snapshot.counters["t5_tokens"] for snapshot in seen]
    assert tokens == sorted(tokens)
    assert all(number % TOKENS == 0 for number in tokens)
    # A step is counted before its tokens, and read before them: at most one step's tokens are missing.
    assert all(number >= (count - 1) * TOKENS for number, count in zip(tokens, counted, strict=True))
    assert {snapshot.groups for snapshot in seen} <= tables
    assert (final.counters["t5:decode"], final.counters["t5_tokens"]) == (steps, steps * TOKENS)
    assert final.groups in tables - {()}
    assert final.rank == 1


def test_process_that_has_ended_is_not_alive_and_its_counts_stay(tmp_path):
    with child(tmp_path, 5) as (process, path):
        pass
    snapshot = read(path)
    assert snapshot.pid == process.pid
    assert not snapshot.is_alive()
    assert snapshot.counters["t5:decode"] == 5


@pytest.mark.parametrize("offset", [24, 32], ids=["start time", "boot id"])
def test_pid_that_another_process_has_now_is_not_alive(written, offset):
    data = bytearray(written.path.read_bytes())
    data[offset] ^= 1
    other = written.path.with_name("other.counters")
    other.write_bytes(data)
    assert read(other).pid == os.getpid()
    assert not read(other).is_alive()


def test_start_time_of_a_process_with_a_strange_name(tmp_path):
    """The second field of /proc/<pid>/stat is the command, and may hold brackets and spaces."""
    strange = tmp_path / "a) 1 (b"
    shutil.copy("/bin/sleep", strange)
    with subprocess.Popen([strange, "60"]) as process:
        ticks = counters.process_start_ticks(process.pid)
        process.kill()
    uptime_ticks = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")
    assert abs(uptime_ticks - ticks) < 60 * os.sysconf("SC_CLK_TCK")


def test_start_time_of_no_process():
    with pytest.raises(OSError, match="No such file"):
        counters.process_start_ticks(2**22 + 1)


# Files that are not what they should be.


def spoilt(written: CounterFile, change) -> Path:
    data = bytearray(written.path.read_bytes())
    path = written.path.with_name("spoilt.counters")
    path.write_bytes(change(data) or data)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "32767 bytes, a counters file has 32768"),
        (lambda data: b"\0" + data, "32769 bytes, a counters file has 32768"),
        (lambda data: b"x", "1 bytes, a counters file has 32768"),
        (lambda data: bytes(FILE_BYTES), "not a counters file (or not written yet)"),
        (lambda data: data.__setitem__(slice(0, 8), b"SOMEBODY"), "not a counters file (or not written yet)"),
        (lambda data: data.__setitem__(8, 2), "layout version 2, this reader knows 1"),
    ],
    ids=["truncated", "too long", "one byte", "zeros", "foreign", "version"],
)
def test_unreadable_file_says_why(written, change, message):
    path = spoilt(written, change)
    with pytest.raises(CounterFileError) as error:
        read(path)
    assert str(error.value) == f"{path}: {message}"


def test_empty_file(tmp_path):
    path = tmp_path / "empty.counters"
    path.touch()
    with pytest.raises(CounterFileError, match=r"empty\.counters: 0 bytes, a counters file has 32768$"):
        read(path)


@pytest.mark.parametrize(
    "table", [b"[{]", b'{"group": 1}', b'[{"colour": "red"}]', b"\xff\xfe"], ids=["json", "object", "field", "utf-8"]
)
def test_damaged_group_table_is_a_counter_file_error(written, table):
    """It was a JSONDecodeError or a TypeError, which ended the supervisor's reading of the whole directory."""
    written.set_groups([GROUP])

    def change(data: bytearray) -> None:
        data[1024 : 1024 + len(table)] = table
        data[80:88] = struct.pack("<Q", len(table))

    path = spoilt(written, change)
    with pytest.raises(CounterFileError, match="group table"):
        read(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing.counters")


def test_directory_is_read_in_name_order_with_errors_in_their_place(tmp_path, written):
    directory = written.path.parent
    (directory / "0-foreign.counters").write_bytes(bytes(FILE_BYTES))
    (directory / "z-short.counters").write_bytes(b"x")
    (directory / "note.txt").write_text("not ours")
    found = dict(read_all(directory))
    assert [path.name for path in found] == ["0-foreign.counters", written.path.name, "z-short.counters"]
    first, second, third = found.values()
    assert isinstance(first, CounterFileError)
    assert isinstance(second, Snapshot)
    assert second.pid == os.getpid()
    assert isinstance(third, CounterFileError)


def test_file_that_vanishes_while_the_directory_is_read_is_passed_over(written, monkeypatch):
    gone = written.path.with_name("0-gone.counters")
    gone.write_bytes(b"")
    really_read = counters.read

    def read_after_removal(path):
        if path == gone:
            gone.unlink()
        return really_read(path)

    monkeypatch.setattr(counters, "read", read_after_removal)
    assert [path for path, _ in read_all(gone.parent)] == [written.path]


def test_directory_that_is_not_there_yet_holds_nothing(tmp_path):
    assert list(read_all(tmp_path / "later")) == []


# A place that can't be written.


def assert_counts_in_memory(file: CounterFile) -> None:
    assert file.path is None
    file.t5_step(StepKind.DECODE, 2)
    file.set_groups([GROUP])
    assert file.snapshot().counters["t5:decode"] == 1
    assert file.snapshot().groups == (GROUP,)
    file.close()


def test_directory_that_can_not_be_made(tmp_path):
    (tmp_path / "file").touch()
    file = CounterFile(tmp_path / "file" / "stats")
    assert file.error == f"Not a directory: {tmp_path}/file/stats"
    assert_counts_in_memory(file)


def test_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write anywhere")
    file = CounterFile(tmp_path)
    assert file.error == f"Permission denied: {tmp_path}"
    assert_counts_in_memory(file)


def test_no_space_left(tmp_path, monkeypatch):
    """Found out when the file is made. A hole would be a bus error at the first count, amid a step."""

    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = CounterFile(tmp_path)
    assert file.error == f"No space left on device: {tmp_path}"
    assert list(tmp_path.iterdir()) == []
    assert_counts_in_memory(file)


@pytest.fixture
def tiny_tmpfs(tmp_path):
    """A tmpfs with less room than a counters file, where this user may mount one."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    command = [mount, "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)]
    if not mount or not umount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    yield tmp_path
    subprocess.run([umount, str(tmp_path)], check=True)


def test_full_tmpfs(tiny_tmpfs):
    file = CounterFile(tiny_tmpfs)
    assert file.error == f"No space left on device: {tiny_tmpfs}"
    assert list(tiny_tmpfs.iterdir()) == []
    assert_counts_in_memory(file)


def test_room_is_allocated_not_a_hole(written):
    assert written.path.stat().st_blocks * 512 >= FILE_BYTES


# The group table.


def test_groups_come_back_with_their_reasons(written):
    groups = (GROUP, GroupInfo("language.layers.1 é", "auto", 96, 128, "FLASHINFER", "head_size 96 is not one of"))
    written.set_groups(groups)
    assert read(written.path).groups == groups
    written.set_groups(groups[:1])
    assert read(written.path).groups == groups[:1]
    written.set_groups([])
    assert read(written.path).groups == ()


def test_groups_beyond_the_tables_room_are_left_out(written):
    groups = [GroupInfo(f"model.layers.{number}", "fp8", 128, 16, "TORCH_REF", "x" * 200) for number in range(200)]
    written.set_groups(groups)
    shown = read(written.path).groups
    assert 0 < len(shown) < 200
    assert list(shown) == groups[: len(shown)]
    one_more = json.dumps([vars(group) for group in groups[: len(shown) + 1]])
    assert len(one_more) > FILE_BYTES - 1024


def test_no_groups_while_their_table_is_being_written(written):
    written.set_groups([GROUP])
    written._cells[72 // 8] += 1
    snapshot = read(written.path)
    assert snapshot.groups == ()
    assert snapshot.counters["t5:decode"] == 0  # counts are read all the same
    written._cells[72 // 8] += 1
    assert read(written.path).groups == (GROUP,)


def test_no_groups_where_the_table_changed_during_the_reading(written):
    written.set_groups([GROUP])

    class Racing:
        """The mapped file, whose writer finishes another table just when this one is copied out."""

        def __getitem__(self, key):
            written.set_groups([GROUP, GROUP])
            return written._map[key]

    assert counters._groups(Racing(), written._cells, "file") == ()


def test_reader_maps_read_only(written, monkeypatch):
    protections = []
    real = mmap.mmap

    def spy(*args, **kwargs):
        protections.append(kwargs.get("prot"))
        return real(*args, **kwargs)

    monkeypatch.setattr(counters.mmap, "mmap", spy)
    read(written.path)
    assert protections == [mmap.PROT_READ]
