"""The number of parameters of a model, their bytes, and the FLOPs per token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from steelyard.core import units
from steelyard.core.recipe.blocks import ExpertsBlock, LayerBlock
from steelyard.core.recipe.model_section import ModelConfig


class LayerSize(NamedTuple):
    """Parameters of one layer on a rank, and those of them that are experts."""

    total: int
    experts: int
    active: int
    """Parameters that compute one token."""
    matrices: int
    """Parameters in weight matrices, experts included."""


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. Layers may differ. A tied head counts only if it is a copy."""

    embedding: int
    layer: int
    """The largest layer."""
    layers: int
    """The number of layers."""
    final_norm: int
    head: int
    all_layers: int
    experts: int = 0
    """Experts of all layers, which `parallel.expert` shards; `all_layers` includes them."""
    layer_experts: int = 0
    """Experts of the largest layer."""
    active_layers: int = 0
    """Parameters of all layers that compute one token."""
    matrices: int = 0
    """Parameters in weight matrices of all layers, experts included."""

    @property
    def total(self) -> int:
        """The total number of parameters."""
        return self.ends + self.all_layers

    @property
    def ends(self) -> int:
        """Parameters outside the layers."""
        return self.embedding + self.final_norm + self.head

    @property
    def active(self) -> int:
        """Parameters that compute one token, as published for models with experts: all but the experts not chosen."""
        return self.ends + self.active_layers

    def bytes(self, each: int) -> dict[str, int]:
        """Bytes of each part at `each` bytes per parameter."""
        return {
            "embedding": each * self.embedding,
            "layers": each * self.all_layers,
            "final_norm": each * self.final_norm,
            "head": each * self.head,
        }


def parameters(model: ModelConfig, tensor: int = 1, padded: bool = False, expert: int = 1) -> Parameters:
    """Count the parameters of a model, or of one of its `tensor` x `expert` ranks.

    Published counts exclude the rows that pad the vocabulary; `padded` includes them. Tensor parallelism shards heads,
    the widths of MLPs and experts, and the vocabulary. Norms, routers and positions are on every rank. Biases that are
    added after the reduction are counted on every rank too, although only the first rank has them. The experts that
    compute a token are on any of the expert ranks, so active parameters are not divided by `expert`.
    """
    ends = end_parameters(model, tensor, padded)
    of_layers = sum_layers(tuple(layer_sizes(model, tensor, expert)))
    return replace(of_layers, embedding=ends.embedding, final_norm=ends.final_norm, head=ends.head)


def end_parameters(model: ModelConfig, tensor: int = 1, padded: bool = False) -> Parameters:
    """The parameters of a model without its layers."""
    rows = model.padded_vocab if padded or tensor > 1 else model.vocab
    table = rows * model.hidden // tensor
    head = 0 if model.tied else table
    table += (model.blocks.positions or 0) * model.hidden
    final_norm = sum(param.size for param in model.blocks.norm.params().values())
    return Parameters(table, 0, 0, final_norm, head, 0)


def described(model: ModelConfig) -> str:
    """The number of parameters as text, with that of active ones if the model has experts."""
    size = parameters(model)
    active = f" ({units.count(size.active)} active)" if model.blocks.has_experts else ""
    return units.count(size.total) + active


@lru_cache(maxsize=4096)
def sum_layers(sizes: tuple[LayerSize, ...]) -> Parameters:
    """The parameters of some layers, without embedding, final norm and head. Cached, because a search repeats them."""
    largest = max(sizes, default=LayerSize(0, 0, 0, 0))
    counts = Counter(sizes)
    total, experts, active, matrices = (
        sum(size[field] * count for size, count in counts.items()) for field in range(len(LayerSize._fields))
    )
    return Parameters(0, largest.total, len(sizes), 0, 0, total, experts, largest.experts, active, matrices)


def layer_sizes(model: ModelConfig, tensor: int = 1, expert: int = 1) -> list[LayerSize]:
    """The parameters of each layer on one of `tensor` x `expert` ranks."""
    layers = model.blocks.layers  # Equal layers are one object.
    known = {id(layer): layer_size(layer, tensor, expert) for layer in {id(layer): layer for layer in layers}.values()}
    return [known[id(layer)] for layer in layers]


def layer_size(layer: LayerBlock, tensor: int = 1, expert: int = 1) -> LayerSize:
    """The parameters of one layer on one of `tensor` x `expert` ranks."""
    params = layer.params().values()
    experts = sum(param.size for param in params if param.is_expert) // (tensor * expert)
    split = sum(param.size for param in params if param.shard_dim is not None and not param.is_expert)
    whole = sum(param.size for param in params if param.shard_dim is None)
    total = split // tensor + whole + experts
    matrices = sum(param.size for param in params if param.is_matrix and not param.is_expert) // tensor + experts
    if not isinstance(layer.mlp, ExpertsBlock):
        return LayerSize(total, 0, total, matrices)
    routing = layer.mlp.routing
    active = total - experts + expert * experts * routing.top_k // routing.experts
    return LayerSize(total, experts, active, matrices)


def layer_matrices(model: ModelConfig) -> int:
    """Parameters in the weight matrices of one layer, which sparsity can mask."""
    return sum(rows * columns for rows, columns in matrices(model).values())


def matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows (outputs) and columns (inputs) of the weight matrices of one layer, by name."""
    return model.blocks.layers[0].matrices()


def expert_keys(model: ModelConfig) -> dict[str, int]:
    """The sizes of a model's experts; empty for a dense one."""
    keys = ("experts", "experts_per_token", "expert_ffn", "shared_ffn")
    return {key: value for key in keys if (value := getattr(model, key, None)) is not None}


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one token: 6 per active parameter in a matrix product, and half of full attention (causal).

    The embedding is a lookup and costs nothing. The head is a matrix product, tied or not.
    """
    return float(sum(layer.flops(sequence_length) for layer in model.blocks.layers) + head_flops(model))


def layer_flops(model: ModelConfig, sequence_length: int) -> int:
    """The mean FLOPs of a transformer layer in `flops_per_token`: windows and MLPs differ between layers."""
    return sum(layer.flops(sequence_length) for layer in model.blocks.layers) // model.layers


def head_flops(model: ModelConfig) -> int:
    """The FLOPs of the final norm and the head in `flops_per_token`."""
    return 6 * (end_parameters(model).final_norm + model.vocab * model.hidden)
