"""Context parallelism: each rank holds a part of every sequence and attends to the keys and values of all of it.

A sequence is split into two chunks per rank of n, and rank i holds chunks i and (2n - 1 - i). Under a causal mask early
chunks attend to few keys and late chunks to many, so this balances the work. Keys and values are all-gathered; their
gradients are reduce-scattered.

Tensor suffixes: B batch, L length, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.model import LanguageModel
from steelyard.model.attention import Scoring, attend
from steelyard.model.experts import Experts
from steelyard.parallel.collectives import all_gather
from steelyard.parallel.mesh import MeshAxis


def split(model: LanguageModel, axis: MeshAxis) -> None:
    """Replace the attention of a model by attention across the ranks of an axis."""
    across = ContextParallelAttention(axis)
    model.mask_of = across.mask_of
    for layer in model.layers.values():
        attention: Any = layer.attention
        attention.attend = across
        if isinstance(layer.mlp, Experts):
            layer.mlp.sum_of_sequence = partial(_summed, axis=axis)


def _summed(counts: Tensor, axis: MeshAxis) -> Tensor:
    """The sum over ranks, without a gradient."""
    counts = counts.clone()
    dist.all_reduce(counts, group=axis.group)
    return counts


def positions_of(length: int, axis: MeshAxis) -> Tensor:
    """The positions in a sequence of `length` that this rank holds."""
    chunks = torch.arange(length).chunk(2 * axis.size)
    return torch.cat([chunks[axis.index], chunks[2 * axis.size - 1 - axis.index]])


class ContextParallelAttention:
    """Causal attention of this rank's two chunks to the whole sequence up to each of them."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis
        order = [chunk for index in range(axis.size) for chunk in (index, 2 * axis.size - 1 - index)]
        self.natural_order = [order.index(chunk) for chunk in range(2 * axis.size)]

    def __call__(
        self, query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, mask: Tensor | None, scoring: Scoring
    ) -> Tensor:
        key_BKLE, value_BKLE = self._gathered(key_BKLE), self._gathered(value_BKLE)
        outputs = []
        first, second = self.axis.index, 2 * self.axis.size - 1 - self.axis.index
        for number, (chunk, query) in enumerate(zip((first, second), query_BHLE.chunk(2, dim=2), strict=True)):
            length = query.shape[2]
            end = (chunk + 1) * length
            keys = slice(0 if scoring.window is None else max(0, end - length - scoring.window + 1), end)
            part = None if mask is None else mask[:, :, number * length : (number + 1) * length, keys]
            outputs.append(attend(query, key_BKLE[:, :, keys], value_BKLE[:, :, keys], part, scoring))
        return torch.cat(outputs, dim=2)

    def mask_of(self, documents_BL: Tensor) -> Tensor:
        """True where a token of this rank may attend, given the documents of the whole row: (B, 1, part, L)."""
        whole = torch.arange(documents_BL.shape[1], device=documents_BL.device)
        here = positions_of(documents_BL.shape[1], self.axis).to(documents_BL.device)
        same = documents_BL[:, here, None] == documents_BL[:, None, :]
        return (same & (here[:, None] >= whole))[:, None]

    def _gathered(self, x_BKLE: Tensor) -> Tensor:
        """The chunks of all ranks, in the order of the sequence."""
        chunks = all_gather(x_BKLE, 2, self.axis).chunk(2 * self.axis.size, dim=2)
        return torch.cat([chunks[index] for index in self.natural_order], dim=2)
