"""Experts in Megatron's `torch` checkpoints, by the names of its plain layer (`SequentialMLP`).

mlp.experts.local_experts.E.linear_fc1.weight    SequentialMLP: gate and up projection of one expert
mlp.experts.linear_fc1.weightE                   TEGroupedMLP: the same tensor, renamed in `megatron_args.py`
mlp.experts.weight1                              GroupedMLP: all experts, each transposed

E counts the experts of an expert-parallel rank from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.core.recipe.model_section import ModelConfig

LOCAL = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+(?=\.)")
TRANSPOSED = re.compile(r"\.mlp\.experts\.weight([12])$")


def experts_of(config: ModelConfig) -> int:
    """The number of experts of a layer; 0 without experts."""
    blocks = [layer.mlp.routing.experts for layer in config.blocks.layers if isinstance(layer.mlp, ExpertsBlock)]
    return blocks[0] if blocks else 0


def all_experts(models: list[dict[str, Tensor]], experts: int) -> dict[str, Tensor]:
    """The tensors of all expert-parallel ranks as one model, its experts numbered through."""
    local = experts // len(models)
    whole = {}
    for rank, model in enumerate(models):
        for name, tensor in _one_by_one(model, local):
            match = LOCAL.search(name)
            if match:
                name = LOCAL.sub(str(rank * local + int(match[0])), name)
            if match or rank == 0:
                whole[name] = tensor
    return whole


def _one_by_one(model: dict[str, Tensor], experts: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a rank, with those of `GroupedMLP` split into its experts."""
    for name, tensor in model.items():
        match = TRANSPOSED.search(name)
        if match is None or not experts or tensor.ndim != 2 or tensor.shape[int(match[1]) % 2] % experts:
            yield name, tensor
            continue
        # The memory of all experts is that of (experts, hidden, columns), and of (experts, columns, hidden).
        shape = (experts, len(tensor), -1) if match[1] == "1" else (experts, -1, tensor.shape[1])
        for number, matrix in enumerate(tensor.reshape(shape)):
            plain = f".mlp.experts.local_experts.{number}.linear_fc{match[1]}.weight"
            yield TRANSPOSED.sub(plain, name), matrix.t()
