"""For every test: the process's environment is after it what it was before. And what runs beside what."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

CONTAINERS = "tests/docker/"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Of several processes each has a core. By itself vLLM would bind the threads of every engine to the first.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``-n 2 --dist loadfile``: a file's tests stay together, and so do all that ask the Docker daemon.

    One image is built for them, and `mjolnir up` takes any appliance of the daemon for its own.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return CONTAINERS if nodeid.startswith(CONTAINERS) else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several processes begin with the files that take minutes, so that they end together."""
    if not hasattr(config, "workerinput"):
        return
    engine = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: 0 if item.nodeid.startswith(CONTAINERS) else 1 if item.path in engine else 2)


@pytest.fixture(autouse=True)
def environment_as_found() -> Iterator[None]:
    """Libraries write to `os.environ`, too: torch's inductor names its cache folder there for whoever comes next."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
