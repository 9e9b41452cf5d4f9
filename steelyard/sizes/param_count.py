"""The number of parameters of a model, their bytes, and the FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe.model_section import GptConfig, LlamaConfig


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


def parameters(model: GptConfig | LlamaConfig, tensor: int = 1, padded: bool = False) -> Parameters:
    """Count the parameters of a model, or of one of its `tensor` tensor-parallel ranks.

    Published counts exclude the rows that pad the vocabulary; `padded` includes them. Tensor parallelism shards heads,
    the MLP width and the vocabulary. Norms and positions are on every rank. Biases that are added after the reduction
    are counted on every rank too, although only the first rank has them.
    """
    rows = model.padded_vocab if padded or tensor > 1 else model.vocab
    table = rows * model.hidden // tensor
    head = 0 if model.tied else table
    split = layer_matrices(model)
    if isinstance(model, GptConfig):
        split += 3 * model.hidden + model.ffn
        norm = 2 * model.hidden
        whole = 2 * model.hidden + 2 * norm
        table += model.positions * model.hidden
    else:
        split += (model.heads + 2 * model.kv_heads) * model.head_dim if model.qkv_bias else 0
        norm = model.hidden
        whole = 2 * norm
    return Parameters(table, split // tensor + whole, model.layers, norm, head)


def layer_matrices(model: GptConfig | LlamaConfig) -> int:
    """Parameters in the weight matrices of one layer, which sparsity can mask."""
    return sum(rows * columns for rows, columns in matrices(model).values())


def matrices(model: GptConfig | LlamaConfig) -> dict[str, tuple[int, int]]:
    """Rows (outputs) and columns (inputs) of the weight matrices of one layer, by name."""
    hidden, ffn = model.hidden, model.ffn
    if isinstance(model, GptConfig):
        attention = dict.fromkeys(("query", "key", "value", "output"), (hidden, hidden))
        return attention | {"up": (ffn, hidden), "down": (hidden, ffn)}
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "query": (query, hidden), "key": (key, hidden), "value": (key, hidden), "output": (hidden, query),
        "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
    }  # fmt: skip


def flops_per_token(model: GptConfig | LlamaConfig, sequence_length: int) -> float:
    """FLOPs to train on one token: 6 per parameter in a matrix product, and half of full attention (causal).

    The embedding is a lookup and costs nothing. The head is a matrix product, tied or not.
    """
    return float(model.layers * layer_flops(model, sequence_length) + head_flops(model))


def layer_flops(model: GptConfig | LlamaConfig, sequence_length: int) -> int:
    """The FLOPs of one transformer layer in `flops_per_token`."""
    head_dim = model.head_dim if isinstance(model, LlamaConfig) else model.hidden // model.heads
    return 6 * parameters(model).layer + 6 * model.heads * head_dim * sequence_length


def head_flops(model: GptConfig | LlamaConfig) -> int:
    """The FLOPs of the final norm and the head in `flops_per_token`."""
    return 6 * (parameters(model).final_norm + model.vocab * model.hidden)
