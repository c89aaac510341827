"""The Triton kernels in Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(900)
def test_store_kernels_in_the_interpreter() -> None:
    file = "tests/kernels/test_triton_store.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    assert " skipped" not in result.stdout
