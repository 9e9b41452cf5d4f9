"""8-bit values of a matrix whose errors cancel in its output on calibration data.

Minimizes the squared error of the output over the calibration tokens, one column after the other: given all other
columns, the best value of a weight is the one nearest to the minimum of a parabola. No step makes the error larger, and
pruned weights stay zero. This is cyclic coordinate descent, as in QuantEase (arXiv 2309.01885).

Tensor suffixes: O outputs, I inputs, B inputs of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steelyard.checkpoint.formats.row_scales import ValueFormat, nearest, scales_of
from steelyard.core.errors import RuntimeFailure

PASSES = 4
COLUMNS_AT_ONCE = 64
DAMPING = 0.01  # of the mean diagonal, as in one_shot.py: the calibration tokens are not all tokens


def round_matrix(weight_OI: Tensor, hessian_II: Tensor | None, value_format: ValueFormat) -> Tensor:
    """A matrix whose weights are 8-bit values times the scales of their rows, in fp32. Zeros stay zeros.

    `hessian_II` is that of `one_shot.Hessian`; without it each weight goes to its nearest value.
    """
    scales_O = scales_of(weight_OI, value_format)
    weight_IO = (weight_OI.float() / scales_O[:, None]).t().contiguous()
    found_IO = nearest(weight_IO, value_format).float()
    if hessian_II is not None:
        _cancel_errors(weight_IO, found_IO, _damped(hessian_II), value_format)
    return (found_IO * scales_O).t().contiguous()


def _damped(hessian_II: Tensor) -> Tensor:
    mean = hessian_II.diagonal().mean()
    if not hessian_II.isfinite().all():
        raise RuntimeFailure(
            "the inputs of a matrix are not finite on the calibration data",
            hint="look for infinite or NaN weights in the checkpoint; --device cpu computes in fp32",
        )
    damped_II = hessian_II.clone()
    damped_II.diagonal().add_(DAMPING * mean + torch.finfo(torch.float32).tiny)
    return damped_II


def _cancel_errors(weight_IO: Tensor, found_IO: Tensor, hessian_II: Tensor, value_format: ValueFormat) -> None:
    """Improve the values `found_IO` of weights that were divided by their scales."""
    kept_IO, curvatures_I = weight_IO != 0, hessian_II.diagonal()
    for _ in range(PASSES):
        for first in range(0, len(found_IO), COLUMNS_AT_ONCE):
            rows_BI = hessian_II[first : first + COLUMNS_AT_ONCE]
            slopes_BO = rows_BI @ (weight_IO - found_IO)
            for column, row_I in enumerate(rows_BI):
                number = first + column
                before_O = found_IO[number]
                best_O = before_O + slopes_BO[column] / curvatures_I[number]
                after_O = nearest(best_O, value_format).float().mul_(kept_IO[number])
                slopes_BO[column:].addr_(row_I[number : first + len(rows_BI)], after_O - before_O, alpha=-1)
                found_IO[number] = after_O
