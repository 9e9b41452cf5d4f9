"""The number of parameters of a model, their bytes, and the FLOPs per token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steelyard.core.recipe.blocks import LayerBlock
from steelyard.core.recipe.model_section import ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Parameters by part; `layer` is one of `layers` equal layers. A tied head counts only if it is a copy."""

    embedding: int
    layer: int
    layers: int
    final_norm: int
    head: int

    @property
    def total(self) -> int:
        """The total number of parameters."""
        return self.embedding + self.layer * self.layers + self.final_norm + self.head

    def bytes(self, each: int) -> dict[str, int]:
        """Bytes of each part at `each` bytes per parameter."""
        return {
            "embedding": each * self.embedding,
            "layers": each * self.layer * self.layers,
            "final_norm": each * self.final_norm,
            "head": each * self.head,
        }


def parameters(model: ModelConfig, tensor: int = 1, padded: bool = False) -> Parameters:
    """Count the parameters of a model, or of one of its `tensor` tensor-parallel ranks.

    Published counts exclude the rows that pad the vocabulary; `padded` includes them. Tensor parallelism shards heads,
    the MLP width and the vocabulary. Norms and positions are on every rank. Biases that are added after the reduction
    are counted on every rank too, although only the first rank has them.
    """
    rows = model.padded_vocab if padded or tensor > 1 else model.vocab
    table = rows * model.hidden // tensor
    head = 0 if model.tied else table
    blocks = model.blocks
    table += (blocks.positions or 0) * model.hidden
    final_norm = sum(math.prod(param.shape) for param in blocks.norm.params().values())
    return Parameters(table, layer_parameters(blocks.layers[0], tensor), model.layers, final_norm, head)


def layer_parameters(layer: LayerBlock, tensor: int = 1) -> int:
    """Parameters of one layer, or of one of its tensor-parallel ranks."""
    params = layer.params().values()
    split = sum(math.prod(param.shape) for param in params if param.cut is not None)
    return split // tensor + sum(math.prod(param.shape) for param in params if param.cut is None)


def layer_matrices(model: ModelConfig) -> int:
    """Parameters in the weight matrices of one layer, which sparsity can mask."""
    return sum(rows * columns for rows, columns in matrices(model).values())


def matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows (outputs) and columns (inputs) of the weight matrices of one layer, by name."""
    return model.blocks.layers[0].matrices()


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one token: 6 per parameter in a matrix product, and half of full attention (causal).

    The embedding is a lookup and costs nothing. The head is a matrix product, tied or not.
    """
    return float(sum(layer.flops(sequence_length) for layer in model.blocks.layers) + head_flops(model))


def layer_flops(model: ModelConfig, sequence_length: int) -> int:
    """The mean FLOPs of a transformer layer in `flops_per_token`: windows differ between layers."""
    return sum(layer.flops(sequence_length) for layer in model.blocks.layers) // model.layers


def head_flops(model: ModelConfig) -> int:
    """The FLOPs of the final norm and the head in `flops_per_token`."""
    return 6 * (parameters(model).final_norm + model.vocab * model.hidden)
