"""One-shot pruning methods: which weights of a matrix to keep, given its inputs.

magnitude  keeps the largest |w|.
wanda      keeps the largest |w| times the norm of its input, ||x_i||.
hessian    keeps the largest w^2 / U_ii^2, where U is the upper Cholesky factor of the inverse of the damped H.
sparsegpt  processes the columns from left to right with the same score, and updates the later columns to compensate for
           each pruned weight (the OBS update). Later scores use the updated weights.

H = (2/n) sum x x^T over n tokens. Everything is computed on whole matrices in fp32, so results do not depend on how a
checkpoint is sharded. A column whose input is always zero is dead: its H_ii becomes 1 and its weights count as zero.

Tensor suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from steelyard.core.errors import RuntimeFailure
from steelyard.sparsity.patterns import Pattern, place_hash
from steelyard.sparsity.prune_request import Method

DAMPING = 0.01  # of the mean diagonal
MOST_DAMPING = 1e4
COLUMNS_AT_ONCE = 128


@dataclass(frozen=True)
class Pruned:
    """A pruned matrix."""

    mask_OI: Tensor
    weight_OI: Tensor
    """The kept weights, zero elsewhere; changed only by sparsegpt, and only if `update` is set."""
    damping: float | None = None
    """Of H, relative to its mean diagonal; None without H."""
    dead: int = 0
    """Inputs that are zero in every token."""
    ties: tuple[int, int] = (0, 0)
    """Groups in which equal scores met at the cut, and all groups; without groups of the pattern, rows or blocks."""


class Hessian:
    """H of a matrix's inputs. Its factors are computed once for all matrices that share the inputs."""

    def __init__(self, matrix_II: Tensor) -> None:
        self.matrix_II = matrix_II

    @cached_property
    def dead_I(self) -> Tensor:
        """Inputs that are zero in every token."""
        return self.matrix_II.diagonal() == 0

    @cached_property
    def factor(self) -> tuple[Tensor, float]:
        """U, and the damping that it needed."""
        return inverse_factor(self.matrix_II)


def prune_matrix(
    weight_OI: Tensor, hessian: Hessian | None, pattern: Pattern, method: Method, update: bool = False
) -> Pruned:
    """Prune one matrix. The result has the weight's dtype and device."""
    weight = weight_OI.float()
    if method == "magnitude":
        return _by_score(weight_OI, weight.abs(), pattern)
    assert hessian is not None, "only magnitude needs no inputs"
    if method == "wanda":
        # ||x_i||^2 is H_ii times n/2, which gives the same order.
        return _by_score(weight_OI, weight.abs() * hessian.matrix_II.diagonal().sqrt(), pattern)
    weight = weight.masked_fill(hessian.dead_I, 0.0)
    dead = int(hessian.dead_I.sum())
    factor_II, damping = hessian.factor
    if method == "hessian":
        scored = _by_score(weight_OI, weight.square() / factor_II.diagonal().square(), pattern)
        return replace(scored, damping=damping, dead=dead)
    mask_OI, updated_OI, ties = walk(weight, factor_II, pattern)
    kept_OI = updated_OI.to(weight_OI.dtype) if update else weight_OI.masked_fill(~mask_OI, 0)
    return Pruned(mask_OI, kept_OI, damping, dead, ties)


def _by_score(weight_OI: Tensor, scores_OI: Tensor, pattern: Pattern) -> Pruned:
    mask_OI = pattern.keep_best(scores_OI)
    tied_G = pattern.ties(scores_OI, mask_OI)
    return Pruned(mask_OI, weight_OI.masked_fill(~mask_OI, 0), ties=(int(tied_G.sum()), tied_G.numel()))


def inverse_factor(hessian_II: Tensor) -> tuple[Tensor, float]:
    """U with H^-1 = U^T U, and the damping that it needed: ten times more after each failed factorisation."""
    diagonal = hessian_II.diagonal()
    dead = diagonal == 0
    mean = torch.where(dead, 1.0, diagonal).mean()
    damping = DAMPING
    while damping <= MOST_DAMPING:
        damped = hessian_II.clone()
        damped.diagonal().add_(dead.float() + damping * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed.item():
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed.item() and factor.isfinite().all():
            return factor, damping
        damping *= 10
    raise RuntimeFailure(
        f"H of a matrix's inputs cannot be factored, even with a damping of {MOST_DAMPING:g} x mean diagonal",
        hint="look for infinite or NaN values in the checkpoint's weights",
    )


def walk(weight_OI: Tensor, factor_II: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """SparseGPT: the mask, the updated weights that compensate for it, and the ties of `Pruned`.

    The matrix is transposed, so that each column is contiguous. The update of later columns by a block of columns is
    one matrix product.
    """
    inputs = weight_OI.shape[1]
    group = pattern.group or COLUMNS_AT_ONCE
    at_once = max(group, COLUMNS_AT_ONCE // group * group)
    weight_IO = weight_OI.t().contiguous()
    mask_IO = torch.ones_like(weight_IO, dtype=torch.bool)
    hash_OI, tied = place_hash(weight_OI.shape, weight_OI.device), []
    for first in range(0, inputs, at_once):
        end = min(first + at_once, inputs)
        block = weight_IO[first:end]
        errors, scores = torch.empty_like(block), torch.empty_like(block)
        factor = factor_II[first:end, first:end]
        strengths = factor.diagonal().square()[:, None]
        steps = factor.diagonal().reciprocal()[:, None]
        for column in range(end - first):
            if column % group == 0:
                ahead = slice(column, column + group)
                scores[ahead] = block[ahead].square() / strengths[ahead]
                hashes = hash_OI[:, first + column : min(first + column + group, end)]
                kept = pattern.keep_best(scores[ahead].t(), hashes, across_rows=True).t()
                mask_IO[first + column : first + column + group] = kept
                lost = (~kept).float()
            torch.mul(block[column], lost[column % group], out=errors[column]).mul_(steps[column])
            block[column:].addr_(factor[column, column:], errors[column], alpha=-1)
        tied.append(pattern.ties(scores.t(), mask_IO[first:end].t(), across_rows=True))
        block.masked_fill_(~mask_IO[first:end], 0)
        weight_IO[end:].addmm_(factor_II[first:end, end:].t(), errors, alpha=-1)
    tied_G = torch.cat(tied)
    return mask_IO.t().contiguous(), weight_IO.t().contiguous(), (int(tied_G.sum()), tied_G.numel())


def reconstruction_error(before_OI: Tensor, after_OI: Tensor, hessian_II: Tensor) -> tuple[float, float]:
    """The squared error of a matrix's output over all tokens, and the squared output, up to a common factor."""
    before, difference = before_OI.float(), before_OI.float() - after_OI.float()
    lost, whole = ((matrix @ hessian_II * matrix).sum(dtype=torch.float64) for matrix in (difference, before))
    return max(lost.item(), 0.0), whole.item()
