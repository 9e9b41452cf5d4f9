"""The optimizers that `optim.name` can select, one line each, with what `sizes` and `planning` need to know about them.

The module of the same name in `training/optimizers/` (for `sgd-sai` it is `sgd_sai.py`) builds the torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class OptimizerSpec(NamedTuple):
    """State and cost of an optimizer."""

    states: int
    """Numbers of state per parameter."""
    matrix_states: int
    """The same for weight matrices of layers."""
    matrix_flops: Callable[[int, int, int], int] = lambda rows, columns, iterations: 0
    """FLOPs to compute the update of a weight matrix of a layer, besides operations per element."""


def newton_schulz_flops(rows: int, columns: int, iterations: int) -> int:
    """Three products per iteration: two with the matrix, and one of two Gram matrices of the shorter side."""
    short, long = sorted((rows, columns))
    return iterations * (4 * short**2 * long + 2 * short**3)


STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}
"""Bytes of a number of state, by `optim.state`; int8 has a scale for every 256 numbers."""
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of an accumulated gradient, by `optim.gradients`."""
OPTIMIZERS = {
    "adamw": OptimizerSpec(states=2, matrix_states=2),
    "muon": OptimizerSpec(states=2, matrix_states=1, matrix_flops=newton_schulz_flops),
    "sgd": OptimizerSpec(states=1, matrix_states=1),
    "sgd-sai": OptimizerSpec(states=1, matrix_states=1),
}
