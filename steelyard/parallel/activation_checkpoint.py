"""Activation checkpointing: recompute activations in the backward pass instead of keeping them.

`full` keeps only the input of a layer. `selective` keeps the outputs of matrix products, attention and collectives,
which are expensive, and recomputes the rest, which is cheap; the all-to-alls of experts run again. A number N applies
`full` to N layers of each stage.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from steelyard.model import LanguageModel
from steelyard.model.transformer import TransformerLayer

aten = torch.ops.aten
varlen_attn = torch.ops.torch_attn._varlen_attn  # registered by the import of model.attention
COSTLY = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_mm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._flash_attention_forward.default,
    varlen_attn.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}


def apply(model: LanguageModel, recompute: str | int) -> None:
    """Apply `parallel.recompute` to the layers of a stage."""
    layers = list(model.layers.values())
    if isinstance(recompute, int):
        layers, recompute = layers[:recompute], "full"
    if recompute == "none":
        return
    for layer in layers:
        assert isinstance(layer, TransformerLayer)
        _wrap(layer, selective=recompute == "selective")


def _wrap(layer: TransformerLayer, selective: bool) -> None:
    # The layer calls this inside its forward, so parameter names do not change and hooks on the forward run once.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    layer.recompute_fn = partial(checkpoint, **options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
