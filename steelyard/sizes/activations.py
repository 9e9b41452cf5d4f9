"""Activations that the forward pass saves for the backward pass, in bytes per token on a rank.

The formulas follow the modules in `model/` and how `parallel/` shards them. Autograd saves the input of each matrix
product and norm, and what each pointwise function needs. Flash attention saves query, key, value, its output and one
number per head. Norms compute in fp32 and save their input in fp32, unless the layer is compiled: a compiled layer
saves it in the precision of the residual stream and recomputes SiLU. parallel.tensor divides the heads and the MLP
width. Only parallel.sequence_parallel divides the residual stream, and the input of a column-parallel product is
gathered even then.

Functions of a layer take the number of the layer: those with experts differ from those with an MLP (`ExpertWidths`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.blocks import ExpertsBlock, MlpBlock
from steelyard.sizes.adapter_size import adapter_size

FP32 = 4
INT64 = 8


@dataclass(frozen=True)
class ExpertWidths:
    """Bytes per token of a layer with experts, beside `Widths`. A slot is a token with one of its experts."""

    slots: int
    """Tensors of the hidden width, one row for each slot: the inputs of the experts, and their outputs."""
    outputs: int
    """The outputs of the experts as they are weighted: in fp32, unless the layer is compiled."""
    router: int
    """What the router saves, all of it in fp32: its input, logits, scores and weights."""
    indices: int
    """The experts of a token and the permutations of slots, as 64-bit integers."""
    logits: int


@dataclass(frozen=True)
class Widths:
    """Bytes per token on one rank, by kind of tensor."""

    stream: int
    gathered: int
    query: int
    key: int
    ffn: int
    """All tensors of the width of an MLP or of the experts of a token, shared ones included."""
    norm: int
    log_sum: int
    scores: int
    """Attention weights over the whole sequence, at one byte each."""
    experts: ExpertWidths | None = None


def working_bytes(recipe: Recipe) -> int:
    """Bytes per element of the inputs of matrix products; fp8 products cast from 16-bit tensors."""
    return FP32 if recipe.train.precision == "fp32" else 2


def is_compiled(recipe: Recipe) -> bool:
    """Whether layers are compiled: as the recipe sets it, by default on a GPU."""
    return recipe.train.device != "cpu" if recipe.train.compile is None else recipe.train.compile


def widths(recipe: Recipe, fused_norm: bool = True, number: int = 0) -> Widths:
    """Bytes per token of a layer's tensors. PyTorch has no fused RMSNorm on CPUs; the unfused one saves two copies."""
    model, tensor, each = recipe.model, recipe.parallel.tensor, working_bytes(recipe)
    ranks = tensor if recipe.parallel.sequence_parallel else 1
    block = model.blocks.layers[number]
    has_mean = model.blocks.norm.kind == "layer"
    copies = each if is_compiled(recipe) else FP32 if fused_norm or has_mean else 2 * FP32
    return Widths(
        stream=each * model.hidden // ranks,
        gathered=each * model.hidden,
        query=each * block.attention.query_width // tensor,
        key=each * block.attention.key_width // tensor,
        ffn=each * token_ffn(block.mlp) // tensor,
        norm=(copies * model.hidden + (2 * FP32 if has_mean else FP32)) // ranks,
        log_sum=FP32 * model.heads // tensor,
        scores=model.heads // tensor * recipe.data.sequence_length,
        experts=_expert_widths(recipe, block.mlp) if isinstance(block.mlp, ExpertsBlock) else None,
    )


def token_ffn(mlp: MlpBlock | ExpertsBlock) -> int:
    """The width of the MLP that computes a token: of an MLP, or of the chosen experts and the shared one together."""
    if isinstance(mlp, ExpertsBlock):
        return mlp.routing.top_k * mlp.ffn + (mlp.shared_ffn or 0)
    return mlp.ffn


def _expert_widths(recipe: Recipe, block: ExpertsBlock) -> ExpertWidths:
    """The rows of slots are not divided by `parallel.tensor`: every tensor rank computes a part of each expert.

    With `parallel.expert` a rank receives as many slots as it sends if the load is even, and sorts them once more.
    """
    each, routing = working_bytes(recipe), block.routing
    high = each if is_compiled(recipe) else FP32
    # Scores and logits, of which a layer compiled as a whole computes one again; the weights before and after their
    # division, their sum, and the log sum of the logits.
    scores = 1 if is_compiled(recipe) and recipe.parallel.expert == 1 else 2
    saved = scores * FP32 * routing.experts + FP32 * (2 * routing.top_k + 2)
    inputs = FP32 * block.hidden
    if block.shared is not None and each != FP32:
        inputs += each * block.hidden
    permutations = 3 if recipe.parallel.expert == 1 else 5
    return ExpertWidths(
        slots=each * routing.top_k * block.hidden,
        outputs=high * routing.top_k * block.hidden,
        router=inputs + saved,
        indices=permutations * INT64 * routing.top_k,
        logits=FP32 * routing.experts,
    )


def _is_gated(recipe: Recipe, number: int = 0) -> bool:
    return recipe.model.blocks.layers[number].mlp.gated


def layer(recipe: Recipe, fused_norm: bool = True, number: int = 0) -> int:
    """Bytes per token that a layer saves without recomputation."""
    of = widths(recipe, fused_norm, number)
    silu_again = is_compiled(recipe)
    kept_by_mlp = (4 - silu_again if _is_gated(recipe, number) else 2) * of.ffn
    fp8 = _fp8_inputs(recipe, of, number)
    if of.experts is None:
        kept_by_mlp += of.gathered
    else:
        kept_by_mlp += of.experts.slots + of.experts.outputs + of.experts.router + of.experts.indices
    masks = 2 * of.stream // working_bytes(recipe) if recipe.model.dropout else 0
    norms = len(recipe.model.blocks.layers[number].norm_places)
    kept = norms * of.norm + of.gathered + _attention(recipe, of) + kept_by_mlp + masks
    return kept + fp8 + _adapters(recipe, keeps_outputs=False)


def _fp8_inputs(recipe: Recipe, of: Widths, number: int) -> int:
    """What fp8 products (`training/fp8.py`) save more than 16-bit products: at most 0 if the layer is compiled.

    A compiled layer saves no input of an fp8 product. It computes it again from what norms and the MLP save, with the
    saved maximum; an input that tensor ranks gathered is saved in fp8. Without a compiler every product saves its input
    in fp8, beside the tensors that norms, attention and the MLP save; experts compute in bf16.
    """
    if recipe.train.precision != "fp8":
        return 0
    each, dense = working_bytes(recipe), of.experts is None
    inputs = of.gathered * (2 if dense else 1)
    inner = of.ffn if dense else 0
    if is_compiled(recipe):
        gathered = inputs // each if recipe.parallel.tensor > 1 else 0
        return gathered - inputs - inner
    products = 2 if dense and _is_gated(recipe, number) else 1
    saved = 3 * of.gathered + of.query + (products * of.gathered + of.ffn if dense else 0)
    return saved // each - inputs - inner


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


def selective_layer(recipe: Recipe, number: int = 0) -> int:
    """Bytes per token of a layer that saves its input and the outputs of products, attention and collectives."""
    of, parallel = widths(recipe, number=number), recipe.parallel
    projections = 2 if _is_gated(recipe, number) else 1
    products = 2 * of.query + 2 * of.key + of.log_sum + projections * of.ffn + of.gathered
    products += _mlp_outputs(recipe, of, number)
    exchanged = 2 * of.stream if parallel.tensor > 1 else 0
    exchanged += 2 * of.gathered if parallel.tensor > 1 and parallel.sequence_parallel else 0
    exchanged += 2 * of.key * parallel.context if parallel.context > 1 else 0
    return of.stream + products + exchanged + _adapters(recipe, keeps_outputs=True)


def _mlp_outputs(recipe: Recipe, of: Widths, number: int) -> int:
    """Bytes per token of the outputs of an MLP, or of the router, the experts and the shared expert."""
    mlp = recipe.model.blocks.layers[number].mlp
    if of.experts is None or not isinstance(mlp, ExpertsBlock):
        return of.gathered
    return of.experts.logits + of.experts.slots + (0 if mlp.shared is None else of.gathered)


def full_layer(recipe: Recipe) -> int:
    """Bytes per token of a layer that is recomputed from its input."""
    return widths(recipe).stream


def weight_gradient_inputs(recipe: Recipe, number: int = 0) -> int:
    """Bytes per token of the output gradients that a layer keeps until its weight gradients are computed."""
    of = widths(recipe, number=number)
    projections = 2 if _is_gated(recipe, number) else 1
    return of.gathered + _mlp_outputs(recipe, of, number) + of.query + 2 * of.key + projections * of.ffn


def is_backward_counted(recipe: Recipe) -> bool:
    """Whether `temporaries` follows the order of the passes of a compiled layer, and is no estimate."""
    model, parallel = recipe.model, recipe.parallel
    drops = model.dropout or model.attention_dropout
    is_plain = recipe.sparsity is None and (recipe.finetune is None or recipe.finetune.adapter is None)
    is_split = parallel.tensor > 1 or parallel.context > 1
    return is_compiled(recipe) and is_plain and not drops and not is_split and recipe.train.precision != "fp8"


def _compiled_temporaries(recipe: Recipe, number: int) -> int:
    """What the backward pass of a compiled layer adds at most to what the layer saves, without weight gradients.

    The gradient of the MLP's inner tensor takes the place of that tensor; the gradient of the gate is one more. Experts
    have the gradients of their inputs twice, from gate and up, and have freed their outputs and inner tensor by then.
    With an exchange, the sum of weighted outputs computes the gradient of the slots while their outputs exist.
    """
    of, mlp = widths(recipe, number=number), recipe.model.blocks.layers[number].mlp
    if of.experts is None or not isinstance(mlp, ExpertsBlock):
        return of.ffn
    shared = working_bytes(recipe) * (mlp.shared_ffn or 0)
    freed = 0 if recipe.parallel.expert > 1 else min(of.experts.slots, of.ffn - shared)
    return of.experts.slots - freed + of.gathered + shared


def temporaries(recipe: Recipe, number: int = 0) -> int:
    """Bytes per token allocated temporarily in the backward pass of one layer. An estimate, unless it is counted.

    It counts the gradients inside the MLP, or Llama's RoPE, which takes five fp32 tensors of the query's width. Dropout
    generates its mask with several 64-bit integers per element. Experts also have the gradients of their inputs and
    outputs, and these in fp32 and in the order of the tokens.
    """
    if is_backward_counted(recipe):
        return _compiled_temporaries(recipe, number)
    of, each = widths(recipe, number=number), working_bytes(recipe)
    widest = 2 * of.ffn
    if _is_gated(recipe, number):
        inside = 3 * of.ffn + (0 if of.experts is None else 3 * of.experts.slots + of.experts.outputs)
        widest = max(inside, 5 * FP32 * of.query // each)
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
class LayerBytes:
    """Bytes per token of one layer; `recomputed` has the recomputation of the recipe."""

    kept: int
    recomputed: int
    weight_gradient_inputs: int
    temporaries: int


@dataclass(frozen=True)
class PerToken:
    """All of these bytes per token on a rank, as `sizes.memory` uses them."""

    recipe: Recipe
    widths: Widths
    layers: tuple[LayerBytes, ...]
    """Of each layer of the model."""
    largest: LayerBytes
    is_uniform: bool
    """Whether all layers are equal."""
    exchanged_slots: int
    """Slots that expert parallelism sends and receives in the forward pass of a layer, which all exist at its end."""
    head: int
    rotation: int

    def stage(self, layers: range) -> int:
        """Bytes per token that the layers of a stage save, with the recomputation of the recipe."""
        again = len(layers) - layers_kept(self.recipe, len(layers))
        if self.is_uniform or layers.stop > len(self.layers):
            return (len(layers) - again) * self.largest.kept + again * self.largest.recomputed
        recomputed = sum(self.layers[number].recomputed for number in layers[:again])
        return recomputed + sum(self.layers[number].kept for number in layers[again:])


def per_token(recipe: Recipe) -> PerToken:
    """Bytes per token of a recipe."""
    blocks = recipe.model.blocks.layers
    first = {id(block.mlp): number for number, block in reversed(list(enumerate(blocks)))}
    known = {key: _layer_bytes(recipe, number) for key, number in first.items()}
    largest = LayerBytes(*(max(sizes) for sizes in zip(*(vars(each).values() for each in known.values()), strict=True)))
    return PerToken(
        recipe,
        widths(recipe),
        tuple(known[id(block.mlp)] for block in blocks),
        largest,
        len(set(known.values())) == 1,
        max(
            0 if of.experts is None else 4 * of.experts.slots
            for of in map(partial(widths, recipe, True), first.values())
        ),
        head(recipe),
        rotation(recipe),
    )


def _layer_bytes(recipe: Recipe, number: int) -> LayerBytes:
    selective = recipe.parallel.recompute == "selective"
    return LayerBytes(
        layer(recipe, fused_norm=recipe.train.device != "cpu", number=number),
        selective_layer(recipe, number) if selective else full_layer(recipe),
        weight_gradient_inputs(recipe, number),
        temporaries(recipe, number),
    )
