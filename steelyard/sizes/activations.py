"""What the forward pass leaves in memory for the backward pass, in bytes per token.

Read off the modules in `model/`: autograd keeps the input of each matrix product and norm and what each pointwise
function needs, flash attention keeps query, key, value, its output and one number per head. Where a width is divided by
`tensor`, heads or the MLP are split; where by `stream`, the sequence is (parallel.sequence_parallel), except for what a
column-parallel product takes in, which has been gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.model import GptModel, LlamaModel

FP32 = 4


@dataclass(frozen=True)
class Widths:
    """Bytes that one token takes on one rank, by kind of tensor."""

    stream: int
    gathered: int
    query: int
    key: int
    ffn: int
    norm: int
    log_sum: int


def working_bytes(recipe: Recipe) -> int:
    """Bytes of a number that matrix products take in: fp8 products are fed from 16-bit tensors."""
    return FP32 if recipe.train.precision == "fp32" else 2


def widths(recipe: Recipe, fused_norm: bool = True) -> Widths:
    """The widths of a recipe's tensors. A norm that is not fused (Llama's on a CPU) keeps two copies in fp32."""
    model, tensor, each = recipe.model, recipe.parallel.tensor, working_bytes(recipe)
    ranks = tensor if recipe.parallel.sequence_parallel else 1
    gpt = isinstance(model, GptModel)
    head_dim = model.hidden // model.heads if isinstance(model, GptModel) else model.head_dim
    kv_heads = model.heads if isinstance(model, GptModel) else model.kv_heads
    whole_norm = each * model.hidden + (2 * FP32 if gpt else FP32)
    return Widths(
        stream=each * model.hidden // ranks,
        gathered=each * model.hidden,
        query=each * model.heads * head_dim // tensor,
        key=each * kv_heads * head_dim // tensor,
        ffn=each * model.ffn // tensor,
        norm=(whole_norm if fused_norm or gpt else 2 * FP32 * model.hidden + FP32) // ranks,
        log_sum=FP32 * model.heads // tensor,
    )


def layer(recipe: Recipe, fused_norm: bool = True) -> int:
    """Bytes per token that a layer keeps when nothing is computed again."""
    of = widths(recipe, fused_norm)
    attention = of.norm + of.gathered + 2 * of.query + 2 * of.key + of.log_sum
    kept_by_mlp = 2 if isinstance(recipe.model, GptModel) else 4
    mlp = of.norm + of.gathered + kept_by_mlp * of.ffn
    masks = 2 * of.stream // working_bytes(recipe) if recipe.model.dropout else 0
    return attention + mlp + masks


def selective_layer(recipe: Recipe) -> int:
    """Bytes per token of a layer that keeps what matrix products and attention give out and computes the rest again."""
    of = widths(recipe)
    projections = 1 if isinstance(recipe.model, GptModel) else 2
    return 3 * of.stream + 2 * of.query + 2 * of.key + of.log_sum + projections * of.ffn


def full_layer(recipe: Recipe) -> int:
    """Bytes per token of a layer that is computed again from its input."""
    return widths(recipe).stream


def weight_gradient_inputs(recipe: Recipe) -> int:
    """Bytes per token of the gradients that a layer's matrix products wait with, until the weights' turn comes."""
    of = widths(recipe)
    projections = 1 if isinstance(recipe.model, GptModel) else 2
    return 2 * of.gathered + of.query + 2 * of.key + projections * of.ffn


def temporaries(recipe: Recipe) -> int:
    """Bytes per token that come and go within the backward pass of one layer.

    The MLP's gradients, or Llama's rotation, which is done in fp32: five tensors as wide as the query.
    """
    of = widths(recipe)
    if isinstance(recipe.model, GptModel):
        return 2 * of.ffn + 2 * of.gathered
    rotation = 5 * FP32 * of.query // working_bytes(recipe)
    return max(3 * of.ffn, rotation) + 2 * of.gathered


def head(recipe: Recipe) -> int:
    """Bytes per token of the final norm and of its output, which the loss takes in, with that one's gradient."""
    of = widths(recipe)
    return of.norm + 2 * of.gathered


def rotation(recipe: Recipe) -> int:
    """Bytes per token of the cosines and sines that all layers of a micro-batch share."""
    return 2 * FP32 * recipe.model.head_dim if isinstance(recipe.model, LlamaModel) else 0


def recomputed(recipe: Recipe, layers: int) -> tuple[int, int]:
    """Of a stage's layers, how many are computed again in full, and bytes per token that all of them keep."""
    how = recipe.parallel.recompute
    if how == "selective":
        return 0, layers * selective_layer(recipe)
    again = {"none": 0, "full": layers}[how] if isinstance(how, str) else min(how, layers)
    return again, again * full_layer(recipe) + (layers - again) * layer(recipe)
