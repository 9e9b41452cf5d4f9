"""What the backward pass of a compiled layer adds to the memory of a rank, weight gradients included.

Two of its moments can be the fullest. In the MLP, the gradient of the last projection exists beside the gradients of
activations, and most of what the layer saved is still there. At its end a compiled layer has all of its weight
gradients, because it returns them together, and has freed what it saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.sizes.activations import FP32, PerToken, widths, working_bytes


@dataclass(frozen=True)
class LayerWeights:
    """Parameters of the largest layer on a rank, by who holds them."""

    shared: int
    """Weights that FSDP gathers in the working precision; their gradients have it too."""
    own: int
    """fp32 weights that no other rank holds. They are cast in the forward pass, and autograd keeps the copy."""
    last_projection: int
    """The last projection of the MLP, or of all its experts."""
    last_is_own: bool


def weights_of(recipe: Recipe, layer: int, experts: int, is_own: bool, experts_are_own: bool) -> LayerWeights:
    """The weights of a layer of `layer` parameters, of which `experts` are in experts.

    `is_own`: no other rank shares any weight with this one.
    """
    blocks = [block.mlp for block in recipe.model.blocks.layers]
    widest = max((each.ffn for each in blocks if not isinstance(each, ExpertsBlock)), default=0)
    projections = max(3 if each.gated else 2 for each in blocks)
    own = layer if is_own else experts if experts_are_own else 0
    last = max(experts // projections, recipe.model.hidden * widest // recipe.parallel.tensor)
    return LayerWeights(layer - own, own, last, is_own or (experts_are_own and experts > 0))


def working(recipe: Recipe, per_token: PerToken, tokens: int, weights: LayerWeights) -> int:
    """The most that exists beside what the layer has saved, minus what it has freed by then."""
    each, largest = working_bytes(recipe), per_token.largest
    cast = each if each != FP32 else 0
    gradient = each
    if weights.last_is_own:
        # The gradient is fp32. A CPU rounds it to 16 bits first; the product has used the copy of the weights by then.
        gradient = FP32 - cast + (cast if recipe.train.device == "cpu" else 0)
    in_mlp = tokens * largest.temporaries + gradient * weights.last_projection
    if weights.last_is_own and weights.shared:
        # Own experts with an exchange: the gradient of the slots exists before that of any weight.
        in_mlp = max(tokens * largest.temporaries, gradient * weights.last_projection)
    at_end = each * weights.shared + (FP32 - cast) * weights.own - tokens * largest.kept
    layers = recipe.model.blocks.layers
    number = next((at for at, block in enumerate(layers) if isinstance(block.mlp, ExpertsBlock)), None)
    if number is not None:  # The inputs of gate and up and the gradients of their outputs are freed last.
        of = widths(recipe, number=number)
        at_end += tokens * ((0 if of.experts is None else of.experts.slots) + 2 * of.ffn)
    return max(0, in_mlp, at_end)
