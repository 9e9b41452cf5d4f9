"""The modules of a transformer layer, built from its blocks (`core/recipe/blocks.py`).

Tensor suffixes: B batch, L length, D hidden, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from steelyard.core.recipe.blocks import (
    ATTENTION_NORM,
    ATTENTION_POST_NORM,
    MLP_NORM,
    MLP_POST_NORM,
    AttentionBlock,
    ExpertsBlock,
    LayerBlock,
    NormBlock,
)  # fmt: skip
from steelyard.model.attention import CuSeqlens, KeysUpTo, Scoring, attend, attend_dropping, rows_of
from steelyard.model.dropout import Dropout
from steelyard.model.experts import Experts, RouterOutput, with_router_loss
from steelyard.model.kv_cache import LayerCache
from steelyard.model.mlp import Mlp
from steelyard.model.modules import LayerNorm, Linear, RmsNorm, at_positions, is_inference
from steelyard.model.rope import Rotation, apply_rope

PROJECTIONS = ("query", "key", "value")


class LayerInputs(NamedTuple):
    """The inputs of a layer other than the residual stream. The same for all layers, except where noted."""

    rotation: Rotation | None = None
    """Of this layer's rotary positions."""
    mask: Tensor | CuSeqlens | KeysUpTo | None = None
    sample_ids_B: Tensor | None = None
    row_positions_BL: Tensor | None = None
    cache: LayerCache | None = None
    """The cache of this layer."""
    loss_positions_BK: Tensor | None = None
    """Set for the last layer only: after attention it computes only these positions."""


def norm_of(block: NormBlock) -> nn.Module:
    """The module of a norm."""
    if block.kind == "layer":
        return LayerNorm(block.width, block.eps)
    return RmsNorm(block.width, block.eps, block.is_offset)


class Attention(nn.Module):
    """Causal attention in which groups of query heads may share one key and value head."""

    output: Linear
    joined: Linear | None
    """All three projections as one product (`evaluate/join_projections.py`)."""
    joined_sizes: tuple[int, ...] = ()

    def __init__(self, block: AttentionBlock, dropout: float) -> None:
        super().__init__()
        self.block = block
        self.register_module("joined", None)
        self.head_dim, self.heads = block.head_dim, range(block.heads)
        self.dropout, self.salt = dropout, 0
        self.scoring = Scoring(block.window, block.softcap, block.scale)
        self.attend = attend
        for name, (rows, columns) in block.matrices().items():
            bias = block.output_bias if name == "output" else block.qkv_bias
            self.add_module(name, Linear(columns, rows, bias=bias))
        for name, norm in block.norms().items():
            self.add_module(name, norm_of(norm))

    def forward(self, x_BLD: Tensor, inputs: LayerInputs) -> Tensor:
        query_BHLE, key_BKLE, value_BKLE = self._projected(x_BLD)
        qkv = self._cached(query_BHLE, key_BKLE, value_BKLE, inputs)
        if self.dropout and self.training and inputs.sample_ids_B is not None and inputs.row_positions_BL is not None:
            rows = rows_of(inputs.sample_ids_B, inputs.row_positions_BL, self.heads, self.salt)
            attn_out_BHLE = attend_dropping(*qkv, inputs.mask, self.scoring, rows, self.dropout)
        else:
            attn_out_BHLE = self.attend(*qkv, inputs.mask, self.scoring)
        output: Tensor = self.output(attn_out_BHLE.transpose(1, 2).flatten(-2))
        return output

    def _cached(
        self, query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their positions, and the keys and values of earlier tokens."""
        cache, rotation = inputs.cache, inputs.rotation
        if cache is not None and cache.slot is not None and rotation is not None and is_inference(query_BHLE):
            return cache.extended_rotated(query_BHLE, key_BKLE, value_BKLE, rotation)
        if rotation is not None:
            query_BHLE, key_BKLE = apply_rope(query_BHLE, rotation), apply_rope(key_BKLE, rotation)
        if cache is not None:
            key_BKLE, value_BKLE = cache.extended(key_BKLE, value_BKLE)
        return query_BHLE, key_BKLE, value_BKLE

    def _projected(self, x_BLD: Tensor) -> list[Tensor]:
        """Queries, keys and values by head, normalized if the block has norms."""
        if self.joined is None:
            products = [self.get_submodule(name)(x_BLD) for name in PROJECTIONS]
        else:
            products = list(self.joined(x_BLD).split(self.joined_sizes, dim=-1))
        projected = []
        for name, x_BLF in zip(PROJECTIONS, products, strict=True):
            norm = getattr(self, f"{name}_norm", None)
            if norm is not None and not self.block.norms_heads:
                x_BLF = norm(x_BLF)
            x_BLHE = x_BLF.unflatten(-1, (-1, self.head_dim))
            if norm is not None and self.block.norms_heads:
                x_BLHE = norm(x_BLHE)
            projected.append(x_BLHE.transpose(1, 2))
        return projected


class TransformerLayer(nn.Module):
    """Attention and MLP, each with its norms and added to the residual stream."""

    recompute_fn: Callable[..., Any] | None = None
    """Calls `compute` with activation checkpointing; set by `parallel/activation_checkpoint.py`."""
    attention_norm: nn.Module | None
    attention_post_norm: nn.Module | None
    mlp_norm: nn.Module | None
    mlp_post_norm: nn.Module | None

    def __init__(self, block: LayerBlock, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        norms = {place: norm_of(block.norm) for place in block.norm_places}
        self.register_module(ATTENTION_NORM, norms.get(ATTENTION_NORM))
        self.attention, self.attention_dropout = Attention(block.attention, attention_dropout), Dropout(dropout)
        self.register_module(ATTENTION_POST_NORM, norms.get(ATTENTION_POST_NORM))
        self.register_module(MLP_NORM, norms.get(MLP_NORM))
        self.mlp = Experts(block.mlp) if isinstance(block.mlp, ExpertsBlock) else Mlp(block.mlp)
        self.mlp_dropout = Dropout(dropout)
        self.register_module(MLP_POST_NORM, norms.get(MLP_POST_NORM))

    def forward(self, x_BLD: Tensor, inputs: LayerInputs) -> Tensor:
        computed = self.compute if self.recompute_fn is None else partial(self.recompute_fn, self.compute)
        x_BLD, routed = computed(x_BLD, inputs)
        if routed is None or not self.training:
            return x_BLD
        # Here, because recomputation would count a micro-batch twice.
        assert isinstance(self.mlp, Experts)
        self.mlp.stats.add_(routed.stats)
        return with_router_loss(x_BLD, routed.loss, self.mlp.loss_scale)

    def infer(self, x_BLD: Tensor, branch_BLD: Tensor | None, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """The layer without dropout. Takes and returns the residual stream and a branch that is to be added to it."""
        x_BLD, normalized_BLD = _added(x_BLD, branch_BLD, self.attention_norm)
        branch_BLD = _normalized(self.attention_post_norm, self.attention(normalized_BLD, inputs))
        x_BLD, normalized_BLD = _added(x_BLD, branch_BLD, self.mlp_norm)
        branch = self.mlp(normalized_BLD)
        return x_BLD, _normalized(self.mlp_post_norm, branch[0] if isinstance(self.mlp, Experts) else branch)

    def compute(self, x_BLD: Tensor, inputs: LayerInputs) -> tuple[Tensor, RouterOutput | None]:
        """Compute the layer. With activation checkpointing the backward pass runs all of this again."""
        dropout_keys = inputs.sample_ids_B, inputs.row_positions_BL
        branch_BLD = self.attention(_normalized(self.attention_norm, x_BLD), inputs)
        branch_BLD = _normalized(self.attention_post_norm, branch_BLD)
        x_BLD = x_BLD + self.attention_dropout(branch_BLD, *dropout_keys)
        if inputs.loss_positions_BK is not None:
            x_BLD = at_positions(inputs.loss_positions_BK, x_BLD)
        branch_BLD, routed = self.mlp(_normalized(self.mlp_norm, x_BLD)), None
        if isinstance(self.mlp, Experts):
            branch_BLD, routed = branch_BLD
        x_BLD = x_BLD + self.mlp_dropout(_normalized(self.mlp_post_norm, branch_BLD), *dropout_keys)
        return x_BLD, routed


def _added(x: Tensor, branch: Tensor | None, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    if branch is not None and isinstance(norm, RmsNorm) and is_inference(x):
        from steelyard.model.inference_kernels import add_rms_norm

        return add_rms_norm(x, branch, norm.offset if norm.is_offset else norm.weight, norm.eps, norm.is_offset)
    x = x if branch is None else x + branch
    return x, _normalized(norm, x)


def _normalized(norm: nn.Module | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    normalized: Tensor = norm(x)
    return normalized
