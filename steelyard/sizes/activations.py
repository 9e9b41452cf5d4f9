"""Activations that the forward pass saves for the backward pass, in bytes per token on a rank.

The formulas follow the modules in `model/` and how `parallel/` shards them. Autograd saves the input of each matrix
product and norm, and what each pointwise function needs. Flash attention saves query, key, value, its output and one
number per head. Norms compute in fp32 and save their input in fp32, unless the layer is compiled: a compiled layer
saves it in the precision of the residual stream and recomputes SiLU. parallel.tensor divides the heads and the MLP
width. Only parallel.sequence_parallel divides the residual stream, and the input of a column-parallel product is
gathered even then.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.sizes.adapter_size import adapter_size

FP32 = 4
INT64 = 8


@dataclass(frozen=True)
class Widths:
    """Bytes per token on one rank, by kind of tensor."""

    stream: int
    gathered: int
    query: int
    key: int
    ffn: int
    norm: int
    log_sum: int
    scores: int
    """Attention weights over the whole sequence, at one byte each."""


def working_bytes(recipe: Recipe) -> int:
    """Bytes per element of the inputs of matrix products; fp8 products cast from 16-bit tensors."""
    return FP32 if recipe.train.precision == "fp32" else 2


def is_compiled(recipe: Recipe) -> bool:
    """Whether layers are compiled: as the recipe sets it, by default on a GPU."""
    return recipe.train.device != "cpu" if recipe.train.compile is None else recipe.train.compile


def widths(recipe: Recipe, fused_norm: bool = True) -> Widths:
    """Bytes per token of a recipe's tensors. PyTorch has no fused RMSNorm on CPUs; the unfused one saves two copies."""
    model, tensor, each = recipe.model, recipe.parallel.tensor, working_bytes(recipe)
    ranks = tensor if recipe.parallel.sequence_parallel else 1
    attention = model.blocks.layers[0].attention
    has_mean = model.blocks.norm.kind == "layer"
    copies = each if is_compiled(recipe) else FP32 if fused_norm or has_mean else 2 * FP32
    return Widths(
        stream=each * model.hidden // ranks,
        gathered=each * model.hidden,
        query=each * attention.query_width // tensor,
        key=each * attention.key_width // tensor,
        ffn=each * model.ffn // tensor,
        norm=(copies * model.hidden + (2 * FP32 if has_mean else FP32)) // ranks,
        log_sum=FP32 * model.heads // tensor,
        scores=model.heads // tensor * recipe.data.sequence_length,
    )


def _is_gated(recipe: Recipe) -> bool:
    return recipe.model.blocks.layers[0].mlp.gated


def layer(recipe: Recipe, fused_norm: bool = True) -> int:
    """Bytes per token that a layer saves without recomputation."""
    of = widths(recipe, fused_norm)
    silu_again = is_compiled(recipe)
    kept_by_mlp = 4 - silu_again if _is_gated(recipe) else 2
    masks = 2 * of.stream // working_bytes(recipe) if recipe.model.dropout else 0
    norms = len(recipe.model.blocks.layers[0].norm_places)
    kept = norms * of.norm + 2 * of.gathered + _attention(recipe, of) + kept_by_mlp * of.ffn + masks
    return kept + _adapters(recipe, keeps_outputs=False)


def _adapters(recipe: Recipe, keeps_outputs: bool) -> int:
    """Bytes per token that adapters save: their inner products, and for DoRA the outputs before the scaling.

    `keeps_outputs`: the results of all products are kept.
    """
    each = working_bytes(recipe)
    size = adapter_size(recipe, each)
    if size is None:
        return 0
    return each * (size.ranks + (size.outputs if keeps_outputs or size.is_dora else 0))


def _attention(recipe: Recipe, of: Widths) -> int:
    """Bytes per token of query, key, value and attention output.

    Context parallelism gathers keys and values of the whole sequence and joins the output from two parts. Attention
    dropout has no fused kernel and saves all attention weights.
    """
    context = recipe.parallel.context
    kept = 2 * of.query + 2 * of.key * context + of.log_sum
    kept += of.query if context > 1 else 0
    attention = recipe.model.blocks.layers[0].attention
    if attention.norm is not None:  # Its inputs, in fp32 unless the layer is compiled.
        each = working_bytes(recipe)
        kept += (of.query + of.key) * (each if is_compiled(recipe) else FP32) // each
    layers = recipe.model.blocks.layers
    is_dense = recipe.train.precision == "fp32" or recipe.train.device == "cpu"
    if is_dense and any(layer.attention.softcap is not None for layer in layers):  # Scores, tanh, weights.
        kept += 3 * FP32 * of.scores
    if recipe.model.attention_dropout:
        kept += of.scores * (FP32 + 1 + working_bytes(recipe))
    return kept


def selective_layer(recipe: Recipe) -> int:
    """Bytes per token of a layer that saves its input and the outputs of products, attention and collectives."""
    of, parallel = widths(recipe), recipe.parallel
    projections = 2 if _is_gated(recipe) else 1
    products = 2 * of.query + 2 * of.key + of.log_sum + projections * of.ffn + 2 * of.gathered
    exchanged = 2 * of.stream if parallel.tensor > 1 else 0
    exchanged += 2 * of.gathered if parallel.tensor > 1 and parallel.sequence_parallel else 0
    exchanged += 2 * of.key * parallel.context if parallel.context > 1 else 0
    return of.stream + products + exchanged + _adapters(recipe, keeps_outputs=True)


def full_layer(recipe: Recipe) -> int:
    """Bytes per token of a layer that is recomputed from its input."""
    return widths(recipe).stream


def weight_gradient_inputs(recipe: Recipe) -> int:
    """Bytes per token of the output gradients that a layer keeps until its weight gradients are computed."""
    of = widths(recipe)
    projections = 2 if _is_gated(recipe) else 1
    return 2 * of.gathered + of.query + 2 * of.key + projections * of.ffn


def temporaries(recipe: Recipe) -> int:
    """Bytes per token allocated temporarily in the backward pass of one layer. This is an estimate.

    It counts the gradients inside the MLP, or Llama's RoPE, which takes five fp32 tensors of the query's width. Dropout
    generates its mask with several 64-bit integers per element.
    """
    of, each = widths(recipe), working_bytes(recipe)
    widest = 2 * of.ffn
    if _is_gated(recipe):
        widest = max(3 * of.ffn, 5 * FP32 * of.query // each)
    if recipe.model.dropout and not is_compiled(recipe):
        widest += 4 * INT64 * of.stream // each
    if recipe.model.attention_dropout:
        widest += of.scores * (3 * INT64 + 2 * FP32)
    return widest + 2 * of.gathered


def head(recipe: Recipe) -> int:
    """Bytes per token of the final norm, of its output, and of the gradient of that output."""
    of = widths(recipe)
    ranks = of.gathered // of.stream
    return (FP32 * recipe.model.hidden + 2 * FP32) // ranks + 2 * of.gathered


def rotation(recipe: Recipe) -> int:
    """Bytes per token of the RoPE cosines and sines, which all layers of a micro-batch share."""
    return sum(2 * FP32 * rope.width for rope in recipe.model.blocks.ropes())


def layers_kept(recipe: Recipe, layers: int) -> int:
    """The number of layers of a stage without recomputation."""
    how = recipe.parallel.recompute
    if isinstance(how, str):
        return layers if how == "none" else 0
    return max(0, layers - how)


@dataclass(frozen=True)
class PerToken:
    """All of these bytes per token on a rank, as `sizes.memory` uses them."""

    recipe: Recipe
    widths: Widths
    layer: int
    recomputed_layer: int
    head: int
    rotation: int
    weight_gradient_inputs: int
    temporaries: int

    def stage(self, layers: int) -> int:
        """Bytes per token that the layers of a stage save, with the recomputation of the recipe."""
        kept = layers_kept(self.recipe, layers)
        return kept * self.layer + (layers - kept) * self.recomputed_layer


def per_token(recipe: Recipe) -> PerToken:
    """Bytes per token of a recipe; `recomputed_layer` is a layer with the recomputation of the recipe."""
    selective = recipe.parallel.recompute == "selective"
    return PerToken(
        recipe,
        widths(recipe),
        layer(recipe),
        selective_layer(recipe) if selective else full_layer(recipe),
        head(recipe),
        rotation(recipe),
        weight_gradient_inputs(recipe),
        temporaries(recipe),
    )
