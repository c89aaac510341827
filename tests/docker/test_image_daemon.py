"""The image for real: built, saved, loaded and asked what it is by Docker's daemon.

Skipped where no daemon answers.
"""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import docker
import pytest
from rich.console import Console

from appliance.host.errors import DaemonError, HostError
from appliance.image import build_image, load_image, save_image

pytestmark = [pytest.mark.docker, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose image is one file on nothing: built in a second, without a network."""
    files = {
        "docker/Dockerfile": (
            "ARG CPU_BASE_IMAGE=none\nFROM none:1 AS thor\nRUN true\n"
            "FROM ${CPU_BASE_IMAGE} AS cpu\nCOPY docker/file docker/inputs/ /data/\n"
            "ARG REVISION\nLABEL rev=${REVISION}\n"
        ),
        "docker/file": "content",
        "docker/inputs/README": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "m"]):
        command = ["git", "-C", str(tmp_path), *who, *words]
        subprocess.run(command, check=True, capture_output=True)
    return tmp_path


def contents(client: Any, image: str) -> list[tuple[str, int, int, int, bytes]]:
    """Name, mode, owner and bytes of all files of all layers: everything but times."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(b"".join(client.images.get(image).save()))) as archive:
        for layer in json.load(archive.extractfile("manifest.json"))[0]["Layers"]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                for file in files:
                    data = files.extractfile(file).read() if file.isfile() else b""
                    found.append((file.name, file.mode, file.uid, file.gid, data))
    return found


def test_a_build_makes_the_target_alone_and_its_image_survives_save_and_load(
    client: Any, checkout: Path, tmp_path: Path
) -> None:
    tag = "mjolnir-test:tiny"
    try:
        built = build_image("cpu", tag, base="scratch", root=checkout, console=quiet())
        assert len(client.images.get(tag).labels["rev"]) == 40
        again = build_image("cpu", tag, base="scratch", root=checkout, console=quiet(), no_cache=True)
        first, second = (contents(client, name) for name in (built, again))
        assert first == second
        assert ("data/file", b"content") in [(name, data) for name, *_, data in first]
        size = save_image(tag, tmp_path / "image.tar", console=quiet())
        assert size == (tmp_path / "image.tar").stat().st_size > 1000
        client.images.remove(tag)
        assert load_image(tmp_path / "image.tar", console=quiet()) == [tag]
        assert client.images.get(tag).id == again
    finally:
        for name in (tag, built):
            try:
                client.images.remove(name, force=True)
            except docker.errors.ImageNotFound:
                continue


def test_a_step_that_fails_is_named_with_its_exit_code(client: Any, checkout: Path) -> None:
    with (checkout / "docker/Dockerfile").open("a") as stream:
        stream.write("COPY docker/none /none\n")
    with pytest.raises(HostError, match=r"^step 6/6 \(COPY docker/none /none\) failed: COPY failed: "):
        build_image("cpu", "mjolnir-test:broken", base="scratch", root=checkout, console=quiet())


def test_what_is_no_image_is_not_loaded_or_saved(client: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(DaemonError):
        load_image(tmp_path / "bad.tar", console=quiet())
    with pytest.raises(DaemonError, match="No such image: mjolnir-test:none"):
        save_image("mjolnir-test:none", tmp_path / "out.tar", console=quiet())
    assert not list(tmp_path.glob("*out*"))


def test_the_image_tells_what_it_is_and_keeps_the_build_out(client: Any, cpu_image: str) -> None:
    facts = client.api.inspect_image(cpu_image)
    config = facts["Config"]
    assert config["Entrypoint"] == ["mjolnir", "serve"]
    assert config["User"] == "1000"
    assert set(config["Volumes"]) == {"/cache", "/models"}
    assert config["Labels"]["org.mjolnir.target"] == "cpu"
    assert len(config["Labels"]["org.opencontainers.image.revision"].removesuffix("-dirty")) == 40
    history = json.dumps(client.api.history(cpu_image))
    assert "PIP_" not in history
    assert "/inputs" not in history


def test_another_series_in_the_image_is_seen(client: Any, cpu_image: str) -> None:
    """The image's own check, on its own files: verified as they are, refused when one of them is changed."""
    verify = "cd / && python3 -m appliance.patchqueue verify --queue /opt/mjolnir/patches"
    spoil = "f=$(python3 -m appliance.patchqueue verify --queue /opt/mjolnir/patches | sed 's/.* in //'); "
    spoil += 'echo "#" >>"$f/vllm/v1/attention/backends/registry.py"; '
    run = {"entrypoint": ["sh", "-c"], "remove": True, "user": "0", "stderr": True}
    assert client.containers.run(cpu_image, [verify], **run).startswith(b"verified: ")
    with pytest.raises(docker.errors.ContainerError) as caught:
        client.containers.run(cpu_image, [spoil + verify], **run)
    assert b"registry.py: not patched: expected blob" in caught.value.stderr
