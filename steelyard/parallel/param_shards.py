"""Parts: what this rank holds of each parameter, as plain tensors with their place in the whole.

Sharding and cutting leave parameters in several forms. The optimizer, the gradient norm, initial weights and
checkpoints see none of that: to them a rank has parts, each a tensor and where in the whole parameter it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steelyard.model import LanguageModel
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT, MAGNITUDE, Cut

EMBEDDING, HEAD = "embed.weight", "head.weight"


@dataclass(eq=False)
class ParamShard:
    """The part of one parameter that this rank holds."""

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    """Its values here; writing to it changes the model."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    copies: int
    """Ranks that hold this same part."""
    is_cut: bool
    """Whether other parts of it lie along the tensor axis."""
    is_partial: bool
    """Whether its gradient must still be summed over the tensor axis."""
    is_tied: bool
    """Whether embedding and head are one parameter that lies on two stages."""
    is_twin: bool
    """The head's copy of it: saved and counted as the embedding's."""

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient here, if there is one."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    @property
    def rows(self) -> range:
        """Which rows of the whole it covers, in part or in full."""
        return range(self.offset[0], self.offset[0] + self.tensor.shape[0])


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as it lies in memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def parts_of(model: LanguageModel, mesh: Mesh, cuts: dict[str, Cut], by_sequence: bool) -> list[ParamShard]:
    """All parts of a model or of a stage of it. Where rows are few, some ranks hold none: their part is empty."""
    return [
        _part(name, parameter, model, mesh, cuts.get(name), by_sequence) for name, parameter in model.named_parameters()
    ]


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in (ADAPTER_IN, ADAPTER_OUT, MAGNITUDE)


def _part(
    name: str, parameter: nn.Parameter, model: LanguageModel, mesh: Mesh, cut: Cut | None, by_sequence: bool
) -> ParamShard:
    shape, offset = list(parameter.shape), [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        # fully_shard gives each rank an equal number of rows, the last ones fewer or none.
        rows = -(-shape[0] // mesh.shard)
        offset[0] = min(shape[0], mesh.shard_index * rows)
    if cut is not None:
        offset[cut.dim] += cut.index * shape[cut.dim]
        shape[cut.dim] *= cut.pieces
    is_tied = model.config.tied and mesh.pipeline.size > 1 and name in (EMBEDDING, HEAD)
    is_twin = is_tied and name == HEAD
    return ParamShard(
        name=EMBEDDING if is_twin else name,
        parameter=parameter,
        tensor=local(parameter.data),
        shape=tuple(shape),
        offset=tuple(offset),
        copies=mesh.replicate * (mesh.tensor.size if cut is None else 1),
        is_cut=cut is not None and cut.pieces > 1,
        is_partial=cut is None and (by_sequence or _is_adapter(name)) and mesh.tensor.size > 1,
        is_tied=is_tied,
        is_twin=is_twin,
    )
