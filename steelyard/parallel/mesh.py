"""The mesh: which rank holds which part of the model and of the batch.

    rank = ((pipeline x data + data) x context + context) x tensor + tensor

Parameters are sharded over data and context together, because ranks along both axes see different tokens of the same
step. `zero` decides what is sharded and what is replicated, so these ranks form a mesh (replicate, shard). The expert
axis is the inner part of `shard`: consecutive ranks hold different experts, and those of all other ranks are sharded
and replicated like other parameters, over fewer ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steelyard.core.errors import UserError
from steelyard.core.recipe.parallel_section import ParallelSection

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class MeshAxis:
    """This rank's index and process group along one axis of the mesh."""

    index: int
    size: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class FsdpMesh:
    """The ranks along data and context that FSDP shards parameters over."""

    mesh: DeviceMesh | None = None
    """(replicate, shard) or (shard,); `None` if there is one rank."""
    replicate: int = 1
    """Ranks that hold the same shard of a parameter."""
    shard: int = 1
    index: int = 0
    """This rank's index along `shard`."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold all shards of a parameter."""
        return None if self.mesh is None or self.shard == 1 else self.mesh.get_group("shard")


@dataclass(frozen=True)
class Mesh:
    """This rank's position on all axes. A job of one rank has no process groups."""

    pipeline: MeshAxis
    data: MeshAxis
    context: MeshAxis
    tensor: MeshAxis
    world: MeshAxis
    expert: MeshAxis
    stage: MeshAxis
    """The ranks with this rank's pipeline index, which hold the shards of the same parameters."""
    fsdp: FsdpMesh
    expert_fsdp: FsdpMesh
    """Of the parameters that the expert axis splits."""
    ends: dist.ProcessGroup | None
    """First and last pipeline rank with this rank's other indices, for a head tied to the embedding."""


def alone() -> Mesh:
    """The mesh of a single process."""
    one = MeshAxis(0, 1, None)
    return Mesh(one, one, one, one, one, one, one, FsdpMesh(), FsdpMesh(), None)


def make(parallel: ParallelSection, device_type: str) -> Mesh:
    """The mesh of a layout over all ranks of the default process group."""
    if not dist.is_initialized():
        return alone()
    world = dist.get_world_size()
    data = parallel.data_for(world)
    sizes = (parallel.pipeline, data, parallel.context, parallel.tensor)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    axes = {
        name: MeshAxis(mesh.get_local_rank(name), size, mesh.get_group(name))
        for name, size in zip(AXES, sizes, strict=True)
    }
    columns = data * parallel.context
    replicate = columns if parallel.zero == 0 else parallel.replicate
    shard = columns // replicate
    fsdp = expert_fsdp = FsdpMesh()
    expert = MeshAxis(0, 1, None)
    if columns > 1:
        fsdp = _fsdp_mesh(device_type, parallel, replicate, shard, 1)[0]
        expert_fsdp = fsdp
    if parallel.expert > 1:
        _refuse_experts(parallel, columns if parallel.zero == 0 else shard)
        if parallel.zero == 0:
            replicate //= parallel.expert
        else:
            shard //= parallel.expert
        expert_fsdp, expert = _fsdp_mesh(device_type, parallel, replicate, shard, parallel.expert)
    all_ranks = stage = MeshAxis(dist.get_rank(), world, dist.group.WORLD)
    ends = None
    if parallel.pipeline > 1:
        width = world // parallel.pipeline
        pairs = [[column, world - width + column] for column in range(width)]
        ends, _ = dist.new_subgroups_by_enumeration(pairs)
        stages = [list(range(first, first + width)) for first in range(0, world, width)]
        stage = MeshAxis(dist.get_rank() % width, width, dist.new_subgroups_by_enumeration(stages)[0])
    return Mesh(
        **axes, world=all_ranks, expert=expert, stage=stage, fsdp=fsdp, expert_fsdp=expert_fsdp,
        ends=ends,
    )  # fmt: skip


def _fsdp_mesh(
    device_type: str, parallel: ParallelSection, replicate: int, shard: int, expert: int
) -> tuple[FsdpMesh, MeshAxis]:
    """The FSDP mesh of parameters that every `expert`-th rank holds, and the expert axis."""
    sizes = (parallel.pipeline, replicate, shard, expert, parallel.tensor)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "replicate", "shard", "expert", "tensor"))
    axis = MeshAxis(mesh.get_local_rank("expert"), expert, mesh.get_group("expert"))
    if replicate * shard == 1:
        return FsdpMesh(), axis
    part = mesh["shard"] if replicate == 1 else mesh["replicate", "shard"]
    return FsdpMesh(part, replicate, shard, mesh.get_local_rank("shard")), axis


def _refuse_experts(parallel: ParallelSection, ranks: int) -> None:
    if ranks % parallel.expert:
        raise UserError(
            f"parallel.expert = {parallel.expert} does not divide the {ranks} ranks that share the data",
            hint="choose a divisor of data x context, and with parallel.replicate of data x context / replicate",
        )
