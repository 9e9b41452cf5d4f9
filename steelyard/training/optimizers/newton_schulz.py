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
        gram = _product(None, x.mT, x) if is_tall else _product(None, x, x.mT)
        polynomial = _product(gram, gram, gram, beta=B, alpha=C)
        x = _product(x, x, polynomial, beta=A) if is_tall else _product(x, polynomial, x, beta=A)
    return x


def _product(added: Tensor | None, one: Tensor, other: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """beta added + alpha one @ other, rounded once.

    Many CPUs have no fast product of 16 bits, so there the product of the same numbers is computed in fp32.
    """
    dtype = one.dtype
    if not one.is_cuda:
        one, other, added = one.float(), other.float(), None if added is None else added.float()
    result = torch.bmm(one, other) if added is None else torch.baddbmm(added, one, other, beta=beta, alpha=alpha)
    return result.to(dtype)
