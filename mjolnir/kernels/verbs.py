"""Small steps that several kernels share."""

import triton
import triton.language as tl


@triton.jit
def nonzero(total):
    """A sum of weights to divide by: 1 where no key was visible, so that the output becomes 0."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def natural_lse(top, total):
    """Log-sum-exp in natural units from a maximum and a sum of weights in log2 units; -inf without a key."""
    return (top + tl.log2(nonzero(total))) * 0.6931471805599453
