"""Upgrades on a real Docker daemon, with images of one static program; the command line is killed at every effect."""

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import docker
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = f"mjolnir-test-{os.getpid()}"

pytestmark = [pytest.mark.docker, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def api():
    try:
        client = docker.from_env(timeout=60).api
        client.version()
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker daemon answers: {error}")
    yield client
    client.close()


@pytest.fixture(scope="module")
def images(api, tmp_path_factory):
    """Three good versions and one that never gets ready, each with an id of its own."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the appliance's stand-in")
    program = tmp_path_factory.mktemp("image") / "mjolnir"
    subprocess.run([compiler, "-static", "-Os", "-o", program, HERE / "appliance.c"], check=True)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(program, "bin/mjolnir")
        for folder in ("tmp", "cache", "models"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(entry)
    made = {}
    for version in ("1", "2", "3", "broken"):
        changes = ["ENV PATH=/bin", 'ENTRYPOINT ["mjolnir"]', f"LABEL version={version}"]
        changes += ["ENV BROKEN=1"] if version == "broken" else []
        api.import_image_from_data(stream.getvalue(), repository=NAME, tag=version, changes=changes)
        made[version] = f"{NAME}:{version}"
    yield made
    for image in made.values():
        api.remove_image(image, force=True)


class Host:
    def __init__(self, api, folder: Path) -> None:
        self.api, self.folder = api, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (folder / ".env").write_text(f"MJOLNIR_PORT={port}\nMODELS_DIR=./models\nCACHE_DIR=./cache\n")

    def run(
        self, command: str, *words: str, kill: tuple[int, str] | None = None, deadline: int = 60
    ) -> tuple[int, str, str]:
        program = [str(HERE / "killed_at.py"), str(kill[0]), kill[1]] if kill else ["-m", "appliance.cli"]
        options = ["--name", NAME, "--env-file", str(self.folder / ".env"), "--state-dir", str(self.folder / "state")]
        if command != "down":
            options += ["--deadline", str(deadline)]
        done = subprocess.run(
            [sys.executable, *program, command, *options, "--json", *words],
            capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=self.folder,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def shown(self) -> dict[str, tuple[str, str]]:
        rows = self.api.containers(all=True, filters={"name": NAME})
        return {
            row["Names"][0][1:]: (row["Labels"]["org.mjolnir.image"][len(NAME) + 1 :], row["State"]) for row in rows
        }

    def clean(self) -> None:
        for row in self.api.containers(all=True, filters={"name": NAME}):
            with contextlib.suppress(docker.errors.NotFound):
                self.api.remove_container(row["Id"], force=True)


@pytest.fixture
def host(api, images, tmp_path):
    made = Host(api, tmp_path)
    yield made
    made.clean()


def test_good_broken_and_back(host, images):
    code, _, err = host.run("up", "--image", images["1"])
    assert code == 0, err
    code, out, err = host.run("upgrade", images["2"])
    assert (code, json.loads(out or "{}").get("done")) == (0, "upgrade"), err
    assert host.shown() == {NAME: ("2", "running"), f"{NAME}-previous": ("1", "exited")}
    code, _, err = host.run("upgrade", images["broken"], deadline=8)
    assert code == 1
    assert "did not take over: not ready within 8 s" in err
    assert err.count("\n") == 1
    assert host.shown() == {NAME: ("2", "running"), f"{NAME}-previous": ("1", "exited")}
    assert b"listening, 503" in (host.folder / "state" / f"{NAME}-failed.log").read_bytes()
    assert host.run("rollback")[0] == 0
    assert host.shown() == {NAME: ("1", "running"), f"{NAME}-previous": ("2", "exited")}


def test_the_container_has_its_limits(host, images):
    code, _, err = host.run("up", "--image", images["1"])
    assert code == 0, err
    facts = host.api.inspect_container(NAME)
    limits = facts["HostConfig"]
    assert limits["CapDrop"] == ["ALL"]
    assert limits["SecurityOpt"] == ["no-new-privileges:true"]
    assert limits["ReadonlyRootfs"] is True
    assert limits["Privileged"] is False
    assert limits["RestartPolicy"]["Name"] == "unless-stopped"
    assert limits["LogConfig"]["Config"] == {"max-size": "20m", "max-file": "5"}
    assert facts["Config"]["StopTimeout"] == 90
    assert not any("docker.sock" in bind for bind in limits["Binds"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(6))
def test_killed_at_an_effect_the_next_command_ends_in_order(host, images, number, when):
    """Effects of an upgrade: remove and create the trial's leftovers and the new one, stop, rename, rename, start, …"""
    code, _, err = host.run("up", "--image", images["1"])
    assert code == 0, err
    code, _, err = host.run("upgrade", images["2"], kill=(number, when))
    assert code == -9, err
    code, _, err = host.run("up")
    assert code == 0, err
    shown = host.shown()
    assert shown[NAME][1] == "running"
    assert set(shown) <= {NAME, f"{NAME}-previous"}
    code, _, err = host.run("upgrade", images["3"])
    assert code == 0, err
    assert host.shown()[NAME] == ("3", "running")
