"""Memory of the fused head and loss (`model/loss.py`) on a rank of the last stage."""

from __future__ import annotations

from steelyard.core.recipe import Recipe
from steelyard.sizes.activations import FP32, working_bytes

CHUNK_BYTES = 1 << 31  # of logits, as in model/loss.py


def _rows(recipe: Recipe) -> int:
    return recipe.model.padded_vocab // recipe.parallel.tensor


def _is_in_place(recipe: Recipe) -> bool:
    """Whether the gradient of the logits overwrites them."""
    return recipe.parallel.tensor == 1 and recipe.train.device != "cpu"


def logits_chunk(recipe: Recipe, tokens: int) -> int:
    """A chunk of logits, and what is computed from it.

    A kernel overwrites the logits with their gradient. With a sharded vocabulary, or on a CPU, a chunk needs their
    exponentials and gradient in fp32, and the gradient in 16 bits. A soft cap needs its slopes, and another tensor
    while they are computed.
    """
    each = working_bytes(recipe)
    others = 0 if _is_in_place(recipe) else 2 * FP32 + (0 if each == FP32 else each)
    slopes = 2 * each if recipe.model.blocks.logit_softcap else 0
    return min(CHUNK_BYTES, each * _rows(recipe) * tokens) // each * (each + slopes + others)


def is_one_chunk(recipe: Recipe, tokens: int) -> bool:
    """Whether all logits of a micro-batch are computed at once."""
    return working_bytes(recipe) * _rows(recipe) * tokens <= CHUNK_BYTES


def logits_and_gradient(recipe: Recipe, tokens: int) -> int:
    """The logits of one chunk and their gradient in the same precision, which overwrites them where a kernel does."""
    copies = 1 if _is_in_place(recipe) else 2
    return copies * working_bytes(recipe) * _rows(recipe) * tokens


def head_gradient(recipe: Recipe) -> int:
    """The gradient of the head in fp32, which the forward pass computes and keeps."""
    return FP32 * _rows(recipe) * recipe.model.hidden


def cast_head(recipe: Recipe) -> int:
    """The head in the working precision."""
    return working_bytes(recipe) * _rows(recipe) * recipe.model.hidden
