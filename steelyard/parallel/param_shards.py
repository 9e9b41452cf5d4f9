"""Param shards: the part of each parameter that this rank holds, as a plain tensor with its offset in the whole.

FSDP and tensor parallelism store parameters in several forms. Param shards hide the form from the optimizer, the
gradient norm, weight initialization and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steelyard.core.recipe.blocks import BlockParam
from steelyard.model import LanguageModel
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT, MAGNITUDE, ShardSpec

EMBEDDING, HEAD = "embed.weight", "head.weight"


@dataclass(eq=False)
class ParamShard:
    """The part of one parameter that this rank holds."""

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    """The local values; writing to them changes the model."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    offset: tuple[int, ...]
    copies: int
    """The number of ranks that hold this shard."""
    is_tp_sharded: bool
    """Whether the parameter is split along the tensor axis."""
    is_expert: bool
    """Whether the parameter is split along the expert axis."""
    is_partial: bool
    """Whether its gradient must still be summed over the tensor axis."""
    is_tied: bool
    """Whether embedding and head are one parameter, held by two stages."""
    is_twin: bool
    """Whether this is the head's copy of a tied embedding, which is saved and counted as the embedding."""
    is_matrix: bool = False
    """Whether it is a weight matrix of a layer, or a stack of them, one for each expert."""

    @property
    def gradient(self) -> Tensor | None:
        """The local gradient, if there is one."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    @property
    def rows(self) -> range:
        """The rows of the whole parameter that the shard covers, in part or in full."""
        return range(self.offset[0], self.offset[0] + self.tensor.shape[0])


def local(tensor: Tensor) -> Tensor:
    """The local part of a tensor, without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def param_shards_of(
    model: LanguageModel, mesh: Mesh, specs: dict[str, ShardSpec], expert_specs: dict[str, ShardSpec], by_sequence: bool
) -> list[ParamShard]:
    """The shards of a model or a stage. A parameter with fewer rows than ranks has an empty shard on some ranks."""
    layers = model.blocks.layers
    declared = {
        f"layers.{number}.{name}": param
        for number in model.stage_spec.layers
        for name, param in layers[number].params().items()
    }
    return [
        _param_shard(
            name, parameter, model, mesh, specs.get(name), expert_specs.get(name), by_sequence, declared.get(name)
        )
        for name, parameter in model.named_parameters()
    ]  # fmt: skip


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in (ADAPTER_IN, ADAPTER_OUT, MAGNITUDE)


def _param_shard(
    name: str,
    parameter: nn.Parameter,
    model: LanguageModel,
    mesh: Mesh,
    spec: ShardSpec | None,
    expert_spec: ShardSpec | None,
    by_sequence: bool,
    declared: BlockParam | None,
) -> ParamShard:
    shape, offset = list(parameter.shape), [0] * parameter.ndim
    fsdp = mesh.fsdp if expert_spec is None else mesh.expert_fsdp
    if isinstance(parameter, DTensor):
        # fully_shard assigns the same number of rows to each rank, and fewer or none to the last ranks.
        rows = -(-shape[0] // fsdp.shard)
        offset[0] = min(shape[0], fsdp.index * rows)
    for each in (spec, expert_spec):
        if each is not None:
            offset[each.dim] += each.index * shape[each.dim]
            shape[each.dim] *= each.count
    is_tied = model.config.tied and mesh.pipeline.size > 1 and name in (EMBEDDING, HEAD)
    is_twin = is_tied and name == HEAD
    is_partial = by_sequence or (declared is not None and declared.is_partial) or _is_adapter(name)
    return ParamShard(
        name=EMBEDDING if is_twin else name,
        parameter=parameter,
        tensor=local(parameter.data),
        shape=tuple(shape),
        offset=tuple(offset),
        copies=fsdp.replicate * (mesh.tensor.size if spec is None else 1),
        is_tp_sharded=spec is not None and spec.count > 1,
        is_expert=expert_spec is not None,
        is_partial=spec is None and is_partial and mesh.tensor.size > 1,
        is_tied=is_tied,
        is_twin=is_twin,
        is_matrix=declared is not None and declared.is_matrix,
    )
