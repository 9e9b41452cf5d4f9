"""The GPT-2 family: learned positions, LayerNorm, GELU, biases.

Tensor suffixes: B batch, L length, D hidden, H heads, E head width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.core.recipe.model import GptModel
from steelyard.model.masks import within_documents


class Gpt(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.padded_vocab, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.padded_vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens_BL: Tensor, positions_BL: Tensor | None = None, documents_BL: Tensor | None = None
    ) -> Tensor:
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[None]
        mask = None if documents_BL is None else within_documents(documents_BL)
        x_BLD = self.embed(tokens_BL) + self.positions(positions_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, mask)
        # Rows that only pad the vocabulary are cut off: they are never predicted and never trained.
        logits: Tensor = self.head(self.norm(x_BLD))[..., : self.shape.vocab]
        return logits


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x_BLD: Tensor, mask: Tensor | None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), mask)
        x_BLD = x_BLD + self.mlp(self.mlp_norm(x_BLD))
        return x_BLD


class Attention(nn.Module):
    """Causal attention, every head with its own key and value."""

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x_BLD: Tensor, mask: Tensor | None) -> Tensor:
        query_BHLE, key_BHLE, value_BHLE = (
            projection(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed_BHLE = F.scaled_dot_product_attention(
            query_BHLE, key_BHLE, value_BHLE, attn_mask=mask, is_causal=mask is None
        )
        output: Tensor = self.output(mixed_BHLE.transpose(1, 2).flatten(-2))
        return output


class Mlp(nn.Module):
    """Two projections with GPT-2's approximation of GELU between them."""

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn)
        self.down = nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x_BLD), approximate="tanh"))
        return output
