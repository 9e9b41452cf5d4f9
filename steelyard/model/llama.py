"""The Llama family: RMSNorm, SwiGLU, rotary positions, grouped-query attention.

Tensor suffixes: B batch, L length, D hidden, H heads, K key-value heads, E head width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.core.recipe.model import LlamaModel, RopeScaling
from steelyard.model.masks import within_documents

Rotation = tuple[Tensor, Tensor]


class Llama(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.padded_vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.padded_vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens_BL: Tensor, positions_BL: Tensor | None = None, documents_BL: Tensor | None = None
    ) -> Tensor:
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[None]
        rotation = rotations(self.shape, positions_BL)
        mask = None if documents_BL is None else within_documents(documents_BL)
        x_BLD = self.embed(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, rotation, mask)
        # Rows that only pad the vocabulary are cut off: they are never predicted and never trained.
        logits: Tensor = self.head(self.norm(x_BLD))[..., : self.shape.vocab]
        return logits


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x_BLD: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotation, mask)
        x_BLD = x_BLD + self.mlp(self.mlp_norm(x_BLD))
        return x_BLD


class Attention(nn.Module):
    """Causal attention in which groups of query heads share one key and value head."""

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.grouped = shape.heads != shape.kv_heads

    def forward(self, x_BLD: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        query_BHLE, key_BKLE, value_BKLE = (
            projection(x_BLD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed_BHLE = F.scaled_dot_product_attention(
            rotate(query_BHLE, rotation),
            rotate(key_BKLE, rotation),
            value_BKLE,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.grouped,
        )
        output: Tensor = self.output(mixed_BHLE.transpose(1, 2).flatten(-2))
        return output


class Mlp(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, shape: LlamaModel) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))
        return output


def rotations(shape: LlamaModel, positions_BL: Tensor) -> Rotation:
    """Cosine and sine of each position's angles, one for all heads, in fp32 whatever the model computes in."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=positions_BL.device) / shape.head_dim
    frequencies = shape.rope_theta**-exponents
    if shape.rope_scaling is not None:
        frequencies = scaled(frequencies, shape.rope_scaling)
    angles_BLE = (positions_BL.float()[..., None] * frequencies).repeat(1, 1, 2)
    return angles_BLE.cos()[:, None], angles_BLE.sin()[:, None]


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's rule: long waves are slowed by the factor, short ones kept, those between blended."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + half) of each head by its position's angles."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = x.float() * cosine + torch.cat([-second, first], dim=-1) * sine
    return turned.to(x.dtype)
