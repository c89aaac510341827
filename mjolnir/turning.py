"""K and V turned before they are rounded to six bits: each head's rows times a Hadamard matrix.

A turn spreads what a few channels hold over all of them, so that none is far larger than the others and none saturates
for a few tokens. It costs no accuracy: the matrix is orthogonal but for a factor, so turned queries have the same
scores with turned keys, and what comes out of turned values is turned back.

The entries are 1 and -1, exact in any dtype. Twice applied, the matrix is ``head_size`` times the identity; that factor
is in the scales by which turned rows are read, not in those by which they are written.
"""

import torch


def matrix(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(size, size) symmetric Hadamard matrix of 1 and -1.

    Raises:
        ValueError: the size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix of {size}: accepted: a power of two")
    turn = torch.ones((1, 1), dtype=dtype)
    while len(turn) < size:
        turn = torch.cat([torch.cat([turn, turn], dim=1), torch.cat([turn, -turn], dim=1)])
    return turn
