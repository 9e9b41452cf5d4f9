"""Newton-Schulz iterations: the nearest semi-orthogonal matrix, approximately, by matrix products alone.

Keller Jordan's quintic polynomial, as in `torch.optim.Muon`: singular values come near 1, not exactly to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


def orthogonalize(stack: Tensor, iterations: int) -> Tensor:
    """Orthogonalize each matrix of a stack (n, rows, columns), in the dtype of the stack, which is overwritten.

    The Gram matrix is that of the shorter side, so a tall matrix needs no transposition.
    """
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.div_(torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True).clamp(min=EPS))
    for _ in range(iterations):
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, x, polynomial, beta=A) if is_tall else torch.baddbmm(x, polynomial, x, beta=A)
    return x
