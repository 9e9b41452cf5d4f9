"""Adapters of experts in PEFT's format, which adapts the parameters in which transformers 5 stacks experts.

    gate_up_proj  (experts x 2 width x hidden)  has our gate and up, whose adapters are concatenated: the rank doubles
    down_proj     (experts x hidden x width)

    model.layers.N.mlp.experts.lora_A.weight    (experts * rank x in): the A of each expert, one after the other
    model.layers.N.mlp.experts.lora_B.weight    (out x rank * experts): the expert is the last, fastest index

If both parameters have adapters, those of gate_up_proj are in `mlp.experts.base_layer` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steelyard.finetuning.lora_extension import AdaptedSource
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT

MODULE = "mlp.experts"
STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def adapted_stacks(source: AdaptedSource) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors of PEFT for all experts with adapters, and the rank of each of PEFT's target parameters."""
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for number in range(source.config.layers):
        prefix = source.config.hf_keys.layer.format(number) + MODULE
        stacks = {
            stack: lora
            for stack, names in STACKS.items()
            if (lora := _concatenated([f"layers.{number}.{MODULE}.{name}" for name in names], source)) is not None
        }
        for place, (stack, (lora_a_XRI, lora_b_XOR)) in enumerate(stacks.items(), start=1):
            path = prefix + ".base_layer" * (len(stacks) - place)
            tensors[f"{path}.lora_A.weight"] = lora_a_XRI.flatten(0, 1)
            tensors[f"{path}.lora_B.weight"] = lora_b_XOR.permute(1, 2, 0).flatten(1)
            ranks[f"{MODULE}.{stack}"] = lora_a_XRI.shape[1]
    return tensors, ranks


def _concatenated(modules: list[str], source: AdaptedSource) -> tuple[Tensor, Tensor] | None:
    """A and B of the experts of several of our modules, as one adapter of their stacked rows."""
    adapted = {module: source.adapter_weights(module) for module in modules if module in source.adapted}
    if not adapted:
        return None
    a_matrices = [weights[ADAPTER_IN] for weights in adapted.values()]
    blocks = []
    for module in modules:
        experts, rows, _ = source.origin.sizes()[f"{module}.weight"]
        blocks.append(adapted[module][ADAPTER_OUT] if module in adapted else torch.zeros(experts, rows, 0))
    each = zip(*blocks, strict=True)
    return torch.cat(a_matrices, dim=1), torch.stack([torch.block_diag(*matrices) for matrices in each])
