"""The Llama family: RMSNorm, SwiGLU, rotary positions, grouped-query attention.

Tensor suffixes: B batch, L length, D hidden, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.core.recipe.model_section import LlamaConfig, RopeScaling
from steelyard.model.attention import attend, attend_dropping, rows_of
from steelyard.model.language_model import LanguageModel, LayerInputs, StageSpec, TransformerLayer
from steelyard.model.modules import Linear, RmsNorm

Rotation = tuple[Tensor, Tensor]


class Llama(LanguageModel):
    """Token ids in, logits out."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, part: StageSpec | None = None) -> None:
        super().__init__(config, part)

    def make_layer(self) -> nn.Module:
        return TransformerLayer(LlamaAttention(self.config), LlamaMlp(self.config), self.make_norm, self.config.dropout)

    def make_norm(self) -> nn.Module:
        return RmsNorm(self.config.hidden, self.config.norm_eps)

    def rotation(self, position_ids_BL: Tensor) -> Rotation:
        return rope_cos_sin(self.config, position_ids_BL)


class LlamaAttention(nn.Module):
    """Causal attention in which groups of query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = range(config.heads)
        self.dropout, self.salt = config.attention_dropout, 0
        self.attend = attend
        self.query = Linear(config.hidden, config.heads * config.head_dim, bias=config.qkv_bias)
        self.key = Linear(config.hidden, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.value = Linear(config.hidden, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.output = Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x_BLD: Tensor, inputs: LayerInputs) -> Tensor:
        assert inputs.rotation is not None
        query_BHLE, key_BKLE, value_BKLE = (
            projection(x_BLD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query_BHLE, key_BKLE = apply_rope(query_BHLE, inputs.rotation), apply_rope(key_BKLE, inputs.rotation)
        if inputs.cache is not None:
            key_BKLE, value_BKLE = inputs.cache.extended(key_BKLE, value_BKLE)
        if self.dropout and self.training and inputs.sample_ids_B is not None and inputs.row_positions_BL is not None:
            rows = rows_of(inputs.sample_ids_B, inputs.row_positions_BL, self.heads, self.salt)
            attn_out_BHLE = attend_dropping(query_BHLE, key_BKLE, value_BKLE, inputs.mask, rows, self.dropout)
        else:
            attn_out_BHLE = self.attend(query_BHLE, key_BKLE, value_BKLE, inputs.mask)
        output: Tensor = self.output(attn_out_BHLE.transpose(1, 2).flatten(-2))
        return output


class LlamaMlp(nn.Module):
    """The SwiGLU MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.hidden, config.ffn, bias=False)
        self.up = Linear(config.hidden, config.ffn, bias=False)
        self.down = Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))
        return output


def rope_cos_sin(config: LlamaConfig, position_ids_BL: Tensor) -> Rotation:
    """Cosine and sine of the angles of each position, shared by all heads, always in fp32."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids_BL.device) / config.head_dim
    )
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = scaled(frequencies, config.rope_scaling)
    angles_BLE = (position_ids_BL.float()[..., None] * frequencies).repeat(1, 1, 2)
    return angles_BLE.cos()[:, None], angles_BLE.sin()[:, None]


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's scaling: low frequencies are divided by the factor, high ones kept, those between interpolated."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the angles of its position."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    rotated = x.float() * cosine + torch.cat([-second, first], dim=-1) * sine
    return rotated.to(x.dtype)
