"""For every test: the process's environment is after it what it was before."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_as_found() -> Iterator[None]:
    """Libraries write to `os.environ`, too: torch's inductor names its cache folder there for whoever comes next."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
