"""Tensor parallelism: each rank holds some heads, some of the MLP's width and some rows of the vocabulary.

Weights are sharded, and hooks on the modules communicate their inputs and outputs, so the code of the model does not
change. Attention and MLP take the full residual stream, and their output is all-reduced. With sequence parallelism the
residual stream between them is sharded along the sequence, and the collectives are all-gather and reduce-scatter.

Weights are plain tensors here, not DTensors: a module computes on its local shard, which compiles without changes and
has no DTensor dispatch per operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.model import LanguageModel
from steelyard.model.dropout import Dropout
from steelyard.model.experts import ExpertLinear, Experts
from steelyard.model.loss import VocabHead
from steelyard.model.modules import Linear, RmsNorm
from steelyard.model.quantized_weight import QuantizedWeight
from steelyard.parallel.collectives import all_gather, all_reduce, copy_to_tp, reduce_scatter
from steelyard.parallel.mesh import MeshAxis

SEQUENCE = 1  # the dimension of the residual stream that sequence parallelism shards
BESIDE_WEIGHT = ("mask_logits",)  # sharded like the weight they belong to
# Parameters of an adapter. A dimension that they share with the weight is sharded with it. Parameters that are not
# sharded are replicated, and their gradients must be summed over ranks.
ADAPTER_IN, ADAPTER_OUT, MAGNITUDE = "adapter_in", "adapter_out", "magnitude"
ADAPTER_BY_DIM = {0: (ADAPTER_OUT, MAGNITUDE), 1: (ADAPTER_IN,)}


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded: the dimension, the index of this shard, and the number of shards."""

    dim: int
    index: int
    count: int


def split(model: LanguageModel, axis: MeshAxis, by_sequence: bool) -> dict[str, ShardSpec]:
    """Shard a model over the ranks of an axis, and return the sharded parameters by name."""
    specs: dict[str, ShardSpec] = {}
    for number, layer in model.layers.items():
        attention: Any = layer.attention
        mlp: Any = layer.mlp
        attention.heads = _shard_of_range(attention.heads, axis)
        for path, part in (("attention", attention), ("mlp", mlp)):
            params = part.block.params()
            for name, child in list(part.named_modules()):
                where = f"layers.{number}.{path}.{name}"
                if isinstance(child, Linear):
                    _shard_linear(child, params[f"{name}.weight"].shard_dim, where, axis, specs)
                elif isinstance(child, ExpertLinear):
                    dim = params[f"{name}.weight"].shard_dim
                    assert dim is not None
                    child.shard = (dim, axis.index, axis.size)
                    for parameter in ("weight", *BESIDE_WEIGHT, *ADAPTER_BY_DIM[dim - 1]):
                        if hasattr(child, parameter):
                            shard_param(child, parameter, dim, f"{where}.{parameter}", axis, specs)
                elif isinstance(child, RmsNorm) and any(
                    params[f"{name}.{key}"].shard_dim is not None for key in child.state_dict()
                ):
                    shard_param(child, "weight", 0, f"{where}.weight", axis, specs)
                    setattr(part, name, ShardedRmsNorm(child, axis))
            part.register_forward_pre_hook(_InputHook(axis, by_sequence))
        attention.output.register_forward_hook(_OutputHook(axis, by_sequence))
        (mlp if isinstance(mlp, Experts) else mlp.down).register_forward_hook(_OutputHook(axis, by_sequence))
    _shard_embed_and_head(model, axis, by_sequence, specs)
    if by_sequence:
        for module in model.modules():
            if isinstance(module, Dropout):
                module.shard = (axis.index, axis.size)
    return specs


def _shard_linear(linear: Any, dim: int | None, path: str, axis: MeshAxis, specs: dict[str, ShardSpec]) -> None:
    assert dim is not None, f"{path} is not sharded"
    linear.shard = (dim, axis.index, axis.size)
    if isinstance(linear.weight, QuantizedWeight):
        linear.weight = linear.weight.shard(dim, axis.index, axis.size)
    for parameter in ("weight", *BESIDE_WEIGHT):
        if isinstance(getattr(linear, parameter, None), nn.Parameter):
            shard_param(linear, parameter, dim, f"{path}.{parameter}", axis, specs)
    for parameter in ADAPTER_BY_DIM[dim]:
        if hasattr(linear, parameter):
            shard_param(linear, parameter, dim, f"{path}.{parameter}", axis, specs)
    linear.axis = axis
    if linear.bias is None:
        return
    if dim == 0:
        shard_param(linear, "bias", 0, f"{path}.bias", axis, specs)
    elif axis.index > 0:
        # The output is summed over ranks, so only one rank adds the bias.
        linear.bias = None
    else:
        specs[f"{path}.bias"] = ShardSpec(0, 0, 1)


def shard_param(module: nn.Module, name: str, dim: int, path: str, axis: MeshAxis, specs: dict[str, ShardSpec]) -> None:
    """Replace a parameter by its shard on this rank."""
    whole: nn.Parameter = getattr(module, name)
    shard = whole.detach().chunk(axis.size, dim)[axis.index].clone()
    setattr(module, name, nn.Parameter(shard, whole.requires_grad))
    specs[path] = ShardSpec(dim, axis.index, axis.size)


def _shard_embed_and_head(model: LanguageModel, axis: MeshAxis, by_sequence: bool, specs: dict[str, ShardSpec]) -> None:
    if model.embed is not None:
        shard_param(model.embed, "weight", 0, "embed.weight", axis, specs)
        model.embed = VocabParallelEmbedding(model.embed, axis, by_sequence)
        positions = getattr(model, "positions", None)
        if by_sequence and positions is not None:
            positions.register_forward_hook(_SequenceShardHook(axis))
    if model.head is not None:
        shard_param(model.head, "weight", 0, "head.weight", axis, specs)
        model.vocabulary = VocabParallelHead(axis, model.head.weight.shape[0], by_sequence)
    model.tie()


def _shard_of_range(whole: range, axis: MeshAxis) -> range:
    length = len(whole) // axis.size
    return whole[axis.index * length : (axis.index + 1) * length]


class _InputHook:
    """Passes the full residual stream to the module; the gradient of the input is summed over ranks."""

    def __init__(self, axis: MeshAxis, by_sequence: bool) -> None:
        self.axis, self.by_sequence = axis, by_sequence

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        x = all_gather(x, SEQUENCE, self.axis) if self.by_sequence else copy_to_tp(x, self.axis)
        return (x, *others)


class _OutputHook:
    """Sums the output over ranks. Experts return their statistics beside it, which are the same on all ranks."""

    def __init__(self, axis: MeshAxis, by_sequence: bool) -> None:
        self.axis, self.by_sequence = axis, by_sequence

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            first, *others = output
            return (self(module, inputs, first), *others)
        return reduce_scatter(output, SEQUENCE, self.axis) if self.by_sequence else all_reduce(output, self.axis)


class _SequenceShardHook:
    """Reduces an output that every rank computes in full to this rank's part of the sequence."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.chunk(self.axis.size, SEQUENCE)[self.axis.index]


class ShardedRmsNorm(nn.Module):
    """An RMSNorm over a width that is sharded: the sum of squares is that of all ranks."""

    def __init__(self, norm: Any, axis: MeshAxis) -> None:
        super().__init__()
        self.weight, self.eps, self.axis = norm.weight, norm.eps, axis

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        # Every rank uses the sum, so its gradient is summed too.
        squares = copy_to_tp(all_reduce(wide.square().sum(-1, keepdim=True), self.axis), self.axis)
        scale = torch.rsqrt(squares / (x.shape[-1] * self.axis.size) + self.eps)
        normalized: Tensor = wide * scale * self.weight.float()
        return normalized.to(x.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are sharded. Each rank looks up the rows that it holds, and the results are summed."""

    def __init__(self, embed: nn.Embedding, axis: MeshAxis, by_sequence: bool) -> None:
        rows, hidden = embed.weight.shape
        super().__init__(rows, hidden, _weight=embed.weight)
        self.weight = embed.weight
        self.axis, self.by_sequence = axis, by_sequence

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Look up the local rows and add those of the other ranks."""
        weight = self.weight
        local_BL = tokens_BL - self.axis.index * weight.shape[0]
        is_local_BL = (local_BL >= 0) & (local_BL < weight.shape[0])
        rows_BLD = nn.functional.embedding(local_BL.where(is_local_BL, 0), weight)
        rows_BLD = rows_BLD.where(is_local_BL[..., None], 0.0)
        return reduce_scatter(rows_BLD, SEQUENCE, self.axis) if self.by_sequence else all_reduce(rows_BLD, self.axis)


class VocabParallelHead(VocabHead):
    """A head whose rows are sharded over the ranks of an axis."""

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
