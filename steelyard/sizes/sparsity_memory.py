"""Memory of joint training beside that of the weights: masks, and the dense model that distillation follows."""

from __future__ import annotations

from typing import NamedTuple

from steelyard.core.recipe import Recipe
from steelyard.sizes.activations import working_bytes


class JointSizes(NamedTuple):
    """Bytes of joint training: zero for other recipes."""

    masks: int = 0
    """Bytes of the mask of one weight, sharded like the weight."""
    teacher: int = 0
    """Frozen weights of the dense model, before they are sharded."""
    gathered_teacher: int = 0
    """What forward passes of the dense model gather and keep."""


def joint(recipe: Recipe, held: int, ends: int, columns: int) -> JointSizes:
    """The sizes of a rank that holds this many parameters, `ends` of them in the embedding, final norm and head.

    `columns` ranks share the weights. Frozen layers have no backward pass that would free them: they stay gathered,
    unless ZeRO 3 frees them after the forward pass. The head stays until the loss.
    """
    if recipe.sparsity is None or recipe.sparsity.method != "joint":
        return JointSizes()
    if not recipe.sparsity.distill:
        return JointSizes(masks=1)
    each = working_bytes(recipe)
    gathered = 0 if columns == 1 else ends if recipe.parallel.zero == 3 else held
    return JointSizes(1, each * held, each * gathered)
