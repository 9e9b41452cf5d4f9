"""Tensor parallelism: each rank holds some heads, some of the MLP's width and some rows of the vocabulary.

A module's weights are cut, and what flows in and out of the cut region is exchanged by hooks, so the model's own code
does not change: attention and MLP begin with all of the stream and end in a sum over ranks. With sequence parallelism
the stream between them is cut along the sequence, and the exchanges become gather and scatter.

Weights are plain tensors here, not DTensors: a module computes with exactly what it holds, which compiles as it is and
has no dispatch to pay for on every operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from steelyard.model import LanguageModel
from steelyard.model.dropout import Dropout
from steelyard.model.loss import VocabHead
from steelyard.parallel.collectives import all_gather, all_reduce, copy_to_tp, reduce_scatter
from steelyard.parallel.mesh import MeshAxis

SEQUENCE = 1  # the dimension of the stream that sequence parallelism cuts
BY_ROWS = ("query", "key", "value", "gate", "up")
BY_COLUMNS = ("output", "down")
BESIDE_WEIGHT = ("mask_logits",)  # cut as the weight they belong to
# An adapter's parameters: what they have in common with the weight is cut with it, and what is not cut is whole on
# every rank, where its gradient is a part of a sum.
ADAPTER_IN, ADAPTER_OUT, MAGNITUDE = "adapter_in", "adapter_out", "magnitude"
ADAPTER_CUTS = {0: (ADAPTER_OUT, MAGNITUDE), 1: (ADAPTER_IN,)}


@dataclass(frozen=True)
class Cut:
    """How a parameter was cut: along which dimension, which piece this is, of how many."""

    dim: int
    index: int
    pieces: int


def split(model: LanguageModel, axis: MeshAxis, by_sequence: bool) -> dict[str, Cut]:
    """Cut a model over the ranks of an axis and return what was cut, by parameter name."""
    cuts: dict[str, Cut] = {}
    for number, layer in model.layers.items():
        prefix = f"layers.{number}."
        attention: Any = layer.attention
        mlp: Any = layer.mlp
        attention.heads = _piece(attention.heads, axis)
        for path, part in (("attention", attention), ("mlp", mlp)):
            for name, linear in part.named_children():
                _cut_linear(linear, name, f"{prefix}{path}.{name}", axis, cuts)
            part.register_forward_pre_hook(_Entering(axis, by_sequence))
        attention.output.register_forward_hook(_Leaving(axis, by_sequence))
        mlp.down.register_forward_hook(_Leaving(axis, by_sequence))
    _cut_ends(model, axis, by_sequence, cuts)
    if by_sequence:
        for module in model.modules():
            if isinstance(module, Dropout):
                module.part = (axis.index, axis.size)
    return cuts


def _cut_linear(linear: Any, name: str, path: str, axis: MeshAxis, cuts: dict[str, Cut]) -> None:
    dim = 0 if name in BY_ROWS else 1
    assert name in BY_ROWS + BY_COLUMNS, f"no rule for cutting {path}"
    linear.part = (dim, axis.index, axis.size)
    for parameter in ("weight", *BESIDE_WEIGHT):
        if hasattr(linear, parameter):
            _cut(linear, parameter, dim, f"{path}.{parameter}", axis, cuts)
    for parameter in ADAPTER_CUTS[dim]:
        if hasattr(linear, parameter):
            _cut(linear, parameter, dim, f"{path}.{parameter}", axis, cuts)
    linear.axis = axis
    if linear.bias is None:
        return
    if dim == 0:
        _cut(linear, "bias", 0, f"{path}.bias", axis, cuts)
    elif axis.index > 0:
        # What follows is a sum over ranks, to which a bias may come from one of them only.
        linear.bias = None
    else:
        cuts[f"{path}.bias"] = Cut(0, 0, 1)


def _cut(module: nn.Module, name: str, dim: int, path: str, axis: MeshAxis, cuts: dict[str, Cut]) -> None:
    whole: nn.Parameter = getattr(module, name)
    piece = whole.detach().chunk(axis.size, dim)[axis.index].clone()
    setattr(module, name, nn.Parameter(piece, whole.requires_grad))
    cuts[path] = Cut(dim, axis.index, axis.size)


def _cut_ends(model: LanguageModel, axis: MeshAxis, by_sequence: bool, cuts: dict[str, Cut]) -> None:
    if model.embed is not None:
        _cut(model.embed, "weight", 0, "embed.weight", axis, cuts)
        model.embed = VocabParallelEmbedding(model.embed, axis, by_sequence)
        positions = getattr(model, "positions", None)
        if by_sequence and positions is not None:
            positions.register_forward_hook(_TakingPart(axis))
    if model.head is not None:
        _cut(model.head, "weight", 0, "head.weight", axis, cuts)
        model.vocabulary = VocabParallelHead(axis, model.head.weight.shape[0], by_sequence)
    model.tie()


def _piece(whole: range, axis: MeshAxis) -> range:
    length = len(whole) // axis.size
    return whole[axis.index * length : (axis.index + 1) * length]


class _Entering:
    """All of the stream comes in; its gradient leaves as the sum over ranks."""

    def __init__(self, axis: MeshAxis, by_sequence: bool) -> None:
        self.axis, self.by_sequence = axis, by_sequence

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        x = all_gather(x, SEQUENCE, self.axis) if self.by_sequence else copy_to_tp(x, self.axis)
        return (x, *others)


class _Leaving:
    """The sum over ranks goes out."""

    def __init__(self, axis: MeshAxis, by_sequence: bool) -> None:
        self.axis, self.by_sequence = axis, by_sequence

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return reduce_scatter(output, SEQUENCE, self.axis) if self.by_sequence else all_reduce(output, self.axis)


class _TakingPart:
    """Of something that every rank has whole, this rank's part of the sequence goes on."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.chunk(self.axis.size, SEQUENCE)[self.axis.index]


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are on several ranks: each looks up what it has, and the sum is the whole."""

    def __init__(self, embed: nn.Embedding, axis: MeshAxis, by_sequence: bool) -> None:
        rows, hidden = embed.weight.shape
        super().__init__(rows, hidden, _weight=embed.weight)
        self.weight = embed.weight
        self.axis, self.by_sequence = axis, by_sequence

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Look up the rows that are here, and add those of the other ranks."""
        weight = self.weight
        place_BL = tokens_BL - self.axis.index * weight.shape[0]
        is_here_BL = (place_BL >= 0) & (place_BL < weight.shape[0])
        found_BLD = nn.functional.embedding(place_BL.where(is_here_BL, 0), weight)
        found_BLD = found_BLD.where(is_here_BL[..., None], 0.0)
        return reduce_scatter(found_BLD, SEQUENCE, self.axis) if self.by_sequence else all_reduce(found_BLD, self.axis)


class VocabParallelHead(VocabHead):
    """Some rows of the head, the others being held by the other ranks of the axis."""

    def __init__(self, axis: MeshAxis, rows: int, by_sequence: bool) -> None:
        self.axis, self.by_sequence = axis, by_sequence
        self.first_row = axis.index * rows

    def enter(self, x_BLD: Tensor) -> Tensor:
        return all_gather(x_BLD, SEQUENCE, self.axis) if self.by_sequence else copy_to_tp(x_BLD, self.axis)

    def largest(self, value_N: Tensor) -> Tensor:
        value_N = value_N.clone()
        dist.all_reduce(value_N, dist.ReduceOp.MAX, group=self.axis.group)
        return value_N

    def total(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, group=self.axis.group)
        return value
