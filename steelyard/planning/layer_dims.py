"""The dimensions of a model's layers that their cost depends on."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.blocks import ExpertsBlock


@dataclass(frozen=True)
class ExpertDims:
    """The dimensions of layers with experts, and the share of such layers among all layers."""

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int
    layers_share: float

    @classmethod
    def of(cls, recipe: Recipe) -> ExpertDims | None:
        """The dimensions of a recipe's layers with experts; None if it has none."""
        layers = recipe.model.blocks.layers
        found = [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsBlock)]
        if not found:
            return None
        block = found[0]
        routing = block.routing
        return cls(routing.experts, routing.top_k, block.ffn, block.shared_ffn or 0, len(found) / len(layers))


@dataclass(frozen=True)
class LayerDims:
    """The dimensions of a model, independent of its family."""

    hidden: int
    query: int
    key: int
    heads: int
    head_dim: int
    ffn: int
    gated: bool
    rows: int
    """Rows of the embedding table, including padding."""
    layers: int
    sequence: int
    dropout: bool
    rotary: bool
    experts: ExpertDims | None = None
    """Of the layers with experts; `ffn` is that of layers with an MLP."""

    @property
    def weights(self) -> int:
        """Weights in the matrices of a layer; of one with experts, all of them."""
        experts = self.experts
        width = self.ffn if experts is None else experts.shared_ffn + experts.experts * experts.ffn
        return self.hidden * (2 * (self.query + self.key) + (3 if self.gated else 2) * width)

    @classmethod
    def of(cls, recipe: Recipe) -> LayerDims:
        """The dimensions of the recipe's model."""
        model = recipe.model
        layer = model.blocks.layers[0]
        attention = layer.attention
        return cls(
            hidden=model.hidden,
            query=attention.query_width,
            key=attention.key_width,
            heads=model.heads,
            head_dim=attention.head_dim,
            ffn=model.ffn,
            gated=layer.mlp.gated,
            rows=model.padded_vocab,
            layers=model.layers,
            sequence=recipe.data.sequence_length,
            dropout=model.attention_dropout > 0,
            rotary=attention.rope is not None,
            experts=ExpertDims.of(recipe),
        )
