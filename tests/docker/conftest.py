"""A Docker daemon and the cpu image, built once a run the way a user without a registry builds it."""

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from rich.console import Console

from appliance.image import build_image
from appliance.image_wheels import fill
from appliance.wheels import cache_root

ROOT = Path(__file__).parents[2]
BASE = "mjolnir-base:debian12"
IMAGE = "mjolnir-test:cpu"


@pytest.fixture(scope="session")
def client() -> Iterator[Any]:
    """The daemon that DOCKER_HOST names, else the local one."""
    try:
        made = docker.from_env(timeout=600)
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker daemon answers: {error}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def cpu_image(client: Any) -> str:
    """Name of the cpu image: MJOLNIR_TEST_IMAGE, else built from this checkout.

    The first build makes a base with debootstrap, downloads the wheels, and takes some 8 minutes. The base and the
    wheels are kept, and so are the layers that the checkout's changes do not touch.
    """
    given = os.environ.get("MJOLNIR_TEST_IMAGE")
    if given:
        return given
    if os.getuid() != 0:
        pytest.skip("making a base image takes root; MJOLNIR_TEST_IMAGE names an image that is there")
    try:
        client.images.get(BASE)
    except docker.errors.ImageNotFound:
        subprocess.run([ROOT / "scripts" / "base-image", BASE], check=True, cwd=ROOT)
    wheels = cache_root() / "image-wheels" / "cpu"
    fill(wheels, "cpu", lambda _: None)
    build_image("cpu", IMAGE, base=BASE, wheels=wheels, console=Console(file=io.StringIO()))
    return IMAGE
