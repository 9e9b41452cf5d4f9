"""How many parameters a model has, and how much arithmetic a token costs."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe.model import GptModel, LlamaModel


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. A tied head costs nothing beside the embedding; padding of the vocabulary is not counted."""

    embedding: int
    layer: int
    layers: int
    final_norm: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.layer * self.layers + self.final_norm + self.head


def parameters(model: GptModel | LlamaModel) -> Parameters:
    """Count the parameters of a model."""
    table = model.vocab * model.hidden
    head = 0 if model.tied else table
    if isinstance(model, GptModel):
        attention = 4 * model.hidden * model.hidden + 4 * model.hidden
        mlp = 2 * model.hidden * model.ffn + model.ffn + model.hidden
        norm = 2 * model.hidden
        table += model.positions * model.hidden
    else:
        query, key_value = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
        attention = model.hidden * (query + key_value) + query * model.hidden
        attention += query + key_value if model.qkv_bias else 0
        mlp = 3 * model.hidden * model.ffn
        norm = model.hidden
    return Parameters(table, attention + mlp + 2 * norm, model.layers, norm, head)


def flops_per_token(model: GptModel | LlamaModel, sequence_length: int) -> float:
    """Floating-point operations to train on one token: 6 per multiplying parameter, and causal attention counted half.

    The embedding is a look-up and costs nothing; the head multiplies whether it is tied or not.
    """
    sizes = parameters(model)
    multiplying = sizes.layer * sizes.layers + sizes.final_norm + model.vocab * model.hidden
    head_dim = model.head_dim if isinstance(model, LlamaModel) else model.hidden // model.heads
    attention = 6 * model.layers * model.heads * head_dim * sequence_length
    return 6.0 * multiplying + attention
