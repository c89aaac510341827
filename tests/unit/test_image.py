"""The build context is the same each time and holds only what it should; a failing build costs one line."""

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from appliance.host.errors import DaemonError, HostError, UsageError
from appliance.image import build_arguments, build_image, follow, load_image
from appliance.image_context import DOCKERFILE, Inputs, repository_files, stages_for, write_context
from appliance.patchqueue import REPOSITORY

DOCKERFILE_TEXT = (
    "ARG A=x\nFROM ${A} AS one-build\nRUN 1b\nFROM ${A} AS one\nCOPY --from=one-build /a /a\n"
    "FROM y AS two-root\nRUN 2r\nFROM two-root AS two\nRUN 2\n"
)


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(root), *who, *words]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    files = {
        DOCKERFILE: DOCKERFILE_TEXT,
        ".dockerignore": "# what goes in\n*\n!docker\n!mjolnir\n**/*.pyc\n",
        ".gitignore": "secret.env\n",
        "mjolnir/a.py": "a = 1\n",
        "mjolnir/old.pyc": "bytes",
        "mjolnir/secret.env": "KEY=1",
        "docker/run.sh": "#!/bin/sh\n",
        "tests/test_a.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "docker/run.sh").chmod(0o700)
    git(root, "init", "--quiet")
    git(root, "add", "--all", "--force", "--", ":!mjolnir/secret.env")
    git(root, "commit", "--quiet", "--message", "m")
    return root


def context(root: Path, target: str = "one", inputs: Inputs | None = None) -> bytes:
    stream = io.BytesIO()
    write_context(stream, root, target, inputs or Inputs())
    return stream.getvalue()


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: member for member in archive}


def test_the_same_files_give_the_same_bytes_whatever_their_times_and_owner_bits(checkout: Path) -> None:
    first = context(checkout)
    for path in checkout.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o666)
    (checkout / "docker/run.sh").chmod(0o755)
    assert hashlib.sha256(context(checkout)).hexdigest() == hashlib.sha256(first).hexdigest()
    (checkout / "mjolnir/a.py").write_text("a = 2\n")
    assert context(checkout) != first


def test_members_are_sorted_and_belong_to_root_at_time_zero(checkout: Path) -> None:
    found = members(context(checkout))
    assert list(found) == [".dockerignore", DOCKERFILE, "docker/run.sh", "mjolnir/a.py"]
    assert {(m.uid, m.gid, m.uname, m.mtime) for m in found.values()} == {(0, 0, "", 0)}
    assert [m.mode for m in found.values()] == [0o644, 0o644, 0o755, 0o644]


def test_a_new_file_goes_in_and_a_deleted_one_stays_out(checkout: Path) -> None:
    (checkout / "mjolnir/new.py").write_text("")
    (checkout / "mjolnir/a.py").unlink()
    assert repository_files(checkout) == [".dockerignore", DOCKERFILE, "docker/run.sh", "mjolnir/new.py"]


def test_wheels_and_certificates_get_their_places(checkout: Path, tmp_path: Path) -> None:
    for name in ("b-1-py3-none-any.whl", "a-1-py3-none-any.whl", "notes.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "ca.pem").write_text("PEM")
    found = members(context(checkout, inputs=Inputs(tmp_path, tmp_path / "ca.pem")))
    assert [name for name in found if name.startswith("docker/inputs")] == [
        "docker/inputs/ca.crt",
        "docker/inputs/wheels/a-1-py3-none-any.whl",
        "docker/inputs/wheels/b-1-py3-none-any.whl",
    ]


def test_inputs_that_are_not_there_are_refused(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"wheels='.*/empty': has no \*\.whl; accepted: a folder of wheels"):
        context(checkout, inputs=Inputs(wheels=tmp_path / "empty"))
    with pytest.raises(UsageError, match=r"ca='.*/none': there is no such file; accepted: a PEM file"):
        context(checkout, inputs=Inputs(certificates=tmp_path / "none"))


def test_a_folder_without_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="git can't list its files: fatal: not a git repository"):
        repository_files(tmp_path)


def test_the_classic_builder_gets_only_the_stages_of_its_target() -> None:
    """It builds every stage before the target: `cpu` would have pulled the base of `thor`."""
    assert stages_for(DOCKERFILE_TEXT, "two") == "ARG A=x\nFROM y AS two-root\nRUN 2r\nFROM two-root AS two\nRUN 2\n"
    assert stages_for(DOCKERFILE_TEXT, "one") == DOCKERFILE_TEXT[: DOCKERFILE_TEXT.index("FROM y")]
    with pytest.raises(UsageError, match=r"^target='three': accepted: one, two$"):
        stages_for(DOCKERFILE_TEXT, "three")


def test_the_repository_sends_sources_and_nothing_else() -> None:
    tops = {name.split("/")[0] for name in repository_files(REPOSITORY)}
    assert tops == {
        *(".dockerignore", "LICENSE", "README.md", "appliance", "docker", "mjolnir", "patches", "pyproject.toml"),
        "scripts",
    }
    text = (REPOSITORY / DOCKERFILE).read_text(encoding="utf-8")
    assert "CPU_BASE_IMAGE} AS" not in stages_for(text, "thor")
    assert "{BASE_IMAGE} AS" not in stages_for(text, "cpu")
    for word in ("--mount", "--link", "--chmod", "<<"):
        assert not any(word in line for line in text.splitlines() if not line.startswith("#")), word


def test_settings_of_pip_stay_out_of_an_offline_build_and_folders_of_any(checkout: Path) -> None:
    environment = {
        "PIP_INDEX_URL": "https://x",
        "PIP_EXTRA_INDEX_URL": "file:///y",
        "HTTPS_PROXY": "http://p",
        "A": "b",
    }
    online = build_arguments("cpu", "", checkout, environment, offline=False)
    offline = build_arguments("cpu", "root:1", checkout, environment, offline=True)
    labels = {"VERSION", "REVISION", "CREATED"}
    assert online.keys() - labels == {"PIP_INDEX_URL", "HTTPS_PROXY"}
    assert offline.keys() - labels == {"CPU_BASE_IMAGE", "HTTPS_PROXY"}
    assert len(online["REVISION"]) == 40
    (checkout / "mjolnir/a.py").write_text("a = 3\n")
    assert build_arguments("cpu", "", checkout, {}, offline=True)["REVISION"] == online["REVISION"] + "-dirty"


@pytest.fixture
def progress() -> Iterator[Progress]:
    with Progress(console=Console(file=io.StringIO(), width=200)) as shown:
        yield shown


def test_a_failing_step_costs_one_line_with_its_last_words(progress: Progress) -> None:
    events: list[dict[str, Any]] = [
        {"stream": "Step 1/2 : FROM x"},
        {"stream": " ---> abc\n"},
        {"stream": "Step 2/2 : RUN sh install.sh  finish"},
        *({"stream": f"\x1b[91mline {number}\n\x1b[0m"} for number in range(9)),
        {"stream": "Removing intermediate container abc\n"},
        {"stream": " ---> def\n"},
        {"error": "The command '/bin/sh -c x' returned a non-zero code: 7"},
    ]
    with pytest.raises(HostError) as caught:
        follow(events, progress)
    assert str(caught.value) == ("step 2/2 (RUN sh install.sh finish) failed with exit code 7; line 6; line 7; line 8")
    assert caught.value.exit_code == 1


def test_a_base_that_can_not_be_pulled_is_named(progress: Progress) -> None:
    events = [{"stream": "Step 1/9 : FROM none:1"}, {"error": "pull access denied\nfor none"}]
    with pytest.raises(HostError, match=r"^step 1/9 \(FROM none:1\) failed: pull access denied for none$"):
        follow(events, progress)


def test_the_id_of_the_last_image_is_returned(progress: Progress) -> None:
    assert (
        follow([{"stream": "Step 1/1 : FROM x"}, {"aux": {"ID": "sha256:1"}}, {"stream": "ok"}], progress) == "sha256:1"
    )
    with pytest.raises(HostError, match="ended the build without an image"):
        follow([{"stream": "Step 1/1 : FROM x"}], progress)


def test_no_daemon_costs_one_line(monkeypatch: pytest.MonkeyPatch, checkout: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.delenv("PIP_CERT", raising=False)
    (tmp_path / "file.tar").write_bytes(b"")
    with pytest.raises(DaemonError, match=r"^Docker's daemon can't be used: .*set DOCKER_HOST$"):
        load_image(tmp_path / "file.tar", console=Console(file=io.StringIO()))
    with pytest.raises(UsageError, match=r"^target='gpu': accepted: thor, cpu$"):
        build_image("gpu", root=checkout)
