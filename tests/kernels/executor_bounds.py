"""How near the executor has to be to the float64 oracle.

`ARITHMETIC` holds when the oracle is given the query that the executor computes with (rounded to e4m3 by the tests' own
code, or as it came): what is left is float32 rounding in scores, weights and sums over 1,000 keys, and that of a 16-bit
output. Relative to the largest |V|, since outputs are averages of V.
"""

import math

import torch

from tests.kernels.decode_steps import Step

ARITHMETIC = 2e-6  # largest of 300 random cases: 5.2e-7
ARITHMETIC_LSE = 6e-6  # largest of the same: 1.5e-6


def assert_arithmetic(step: Step, out: torch.Tensor, lse: torch.Tensor | None, **scales) -> None:
    """Output and LSE are the oracle's up to float32 rounding, or that of a 16-bit output."""
    expected, expected_lse = step.oracle(step.computed_query(), **scales)
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[step.case.out_dtype]
    largest = step.largest_value() * float(torch.as_tensor(scales.get("v_scale", 1.0)).abs().max())
    error = (out.double() - expected).abs()
    assert bool((error <= ARITHMETIC * largest + rounding * (expected.abs() + ARITHMETIC * largest)).all()), float(
        error.max()
    )
    if lse is not None:
        dead = expected_lse == -math.inf
        assert torch.equal(lse == -math.inf, dead)
        errors = (lse.double() - expected_lse)[~dead].abs()
        assert float(errors.max() if errors.numel() else 0.0) <= ARITHMETIC_LSE
