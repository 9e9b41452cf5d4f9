"""The GPT-2 family: learned positions, LayerNorm, GELU, biases.

Tensor suffixes: B batch, L length, D hidden, H heads, E head width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.core.recipe.model_section import GptConfig
from steelyard.model.attention import attend, attend_dropping, rows_of
from steelyard.model.language_model import LanguageModel, LayerInputs, StageSpec, TransformerLayer
from steelyard.model.modules import LayerNorm, Linear


class Gpt(LanguageModel):
    """Token ids in, logits out."""

    config: GptConfig

    def __init__(self, config: GptConfig, part: StageSpec | None = None) -> None:
        super().__init__(config, part)
        self.positions = nn.Embedding(config.positions, config.hidden) if self.part.first else None

    def make_layer(self) -> nn.Module:
        return TransformerLayer(GptAttention(self.config), GptMlp(self.config), self.make_norm, self.config.dropout)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden, self.config.norm_eps)

    def embedded(self, tokens_BL: Tensor, position_ids_BL: Tensor) -> Tensor:
        assert self.positions is not None
        positions_BLD: Tensor = self.positions(position_ids_BL)
        return super().embedded(tokens_BL, position_ids_BL) + positions_BLD


class GptAttention(nn.Module):
    """Causal attention, every head with its own key and value."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.heads = range(config.heads)
        self.dropout, self.salt = config.attention_dropout, 0
        self.attend = attend
        self.query = Linear(config.hidden, config.hidden)
        self.key = Linear(config.hidden, config.hidden)
        self.value = Linear(config.hidden, config.hidden)
        self.output = Linear(config.hidden, config.hidden)

    def forward(self, x_BLD: Tensor, inputs: LayerInputs) -> Tensor:
        query_BHLE, key_BHLE, value_BHLE = (
            projection(x_BLD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if inputs.cache is not None:
            key_BHLE, value_BHLE = inputs.cache.extended(key_BHLE, value_BHLE)
        if self.dropout and self.training and inputs.sample_ids_B is not None and inputs.row_positions_BL is not None:
            rows = rows_of(inputs.sample_ids_B, inputs.row_positions_BL, self.heads, self.salt)
            attn_out_BHLE = attend_dropping(query_BHLE, key_BHLE, value_BHLE, inputs.mask, rows, self.dropout)
        else:
            attn_out_BHLE = self.attend(query_BHLE, key_BHLE, value_BHLE, inputs.mask)
        output: Tensor = self.output(attn_out_BHLE.transpose(1, 2).flatten(-2))
        return output


class GptMlp(nn.Module):
    """Two projections with GPT-2's approximation of GELU between them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn)
        self.down = Linear(config.ffn, config.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x_BLD), approximate="tanh"))
        return output
