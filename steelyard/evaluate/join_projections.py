"""Joins the projections of the same input to one product, for inference.

With few rows a product of a small matrix does not reach the memory bandwidth of a GPU: the key and value projections of
a model with grouped heads take twice as long as their bytes require.
"""

from __future__ import annotations

import torch
from torch import nn

from steelyard.model import LanguageModel
from steelyard.model.mlp import Mlp
from steelyard.model.modules import Linear
from steelyard.model.transformer import PROJECTIONS, Attention
from steelyard.sparsity.sparse_linear import SparseLinear


def join_projections(network: LanguageModel) -> None:
    """Replace query, key and value, and gate and up, by one module each, where all are dense or all compressed.

    Compressed modules must not have been prepared yet.
    """
    for module in network.modules():
        if isinstance(module, Attention):
            names: tuple[str, ...] = PROJECTIONS
        elif isinstance(module, Mlp) and module.block.gated:
            names = ("gate", "up")
        else:
            continue
        parts = [part for name in names if isinstance(part := module.get_submodule(name), Linear)]
        if len(parts) < len(names) or {type(part) for part in parts} not in ({Linear}, {SparseLinear}):
            continue
        module.joined = _joined(parts)
        if isinstance(module, Attention):
            module.joined_sizes = tuple(part.out_features for part in parts)
        for name in names:
            delattr(module, name)


def _joined(parts: list[Linear]) -> Linear:
    """One module with the rows of all parts."""
    first = parts[0]
    rows = sum(part.out_features for part in parts)
    joined = Linear(first.in_features, rows, bias=first.bias is not None, device="meta")
    if isinstance(first, SparseLinear):
        joined = SparseLinear(joined, first.dtype)
    for name, _ in list(first.named_parameters()):
        values = torch.cat([part.get_parameter(name).detach() for part in parts])
        setattr(joined, name, nn.Parameter(values, requires_grad=False))
    return joined
