"""Fixtures of the unit tests: a clean environment, the backend's log, and counters of one test only."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mjolnir.names import KernelSource


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer has exported must not decide a test."""
    for name in list(os.environ):
        if name.startswith(("MJOLNIR_", "THOR_T5_")):
            monkeypatch.delenv(name)


@pytest.fixture
def backend_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Every record of the backend's logger; vLLM, once imported, keeps it from the root's handlers."""
    logger = logging.getLogger("vllm.mjolnir")
    before = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = before[0]
    logger.setLevel(before[1])


@pytest.fixture
def stats_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of this test's counters file; the process starts with none."""
    from mjolnir import telemetry

    directory = tmp_path / "stats"
    monkeypatch.setenv("MJOLNIR_STATS_DIR", str(directory))
    monkeypatch.setattr(telemetry, "_counters", {})
    monkeypatch.setattr(telemetry, "_groups", {})
    # What other tests of this process have compiled is not this test's.
    compiler = sys.modules.get("mjolnir.kernels.compiler")
    made = {source: int(compiler.CACHE_STATS[source]) for source in KernelSource} if compiler else {}
    monkeypatch.setattr(telemetry, "_kernels", made)
    return directory


@pytest.fixture
def banner_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The banner, which comes once a process, is not in this test's log."""
    from mjolnir import banner

    monkeypatch.setattr(banner, "_shown", [True])
