"""The mesh: which rank holds which part of the model and of the batch.

    rank = ((pipeline x data + data) x context + context) x tensor + tensor

Parameters are sharded over data and context together, because ranks along both axes see different tokens of the same
step. `zero` decides what is sharded and what is replicated, so these ranks form a mesh (replicate, shard).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steelyard.core.recipe.parallel_section import ParallelSection

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class MeshAxis:
    """This rank's index and process group along one axis of the mesh."""

    index: int
    size: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """This rank's position on all axes. A job of one rank has no process groups."""

    pipeline: MeshAxis
    data: MeshAxis
    context: MeshAxis
    tensor: MeshAxis
    world: MeshAxis
    sharding: DeviceMesh | None
    """(replicate, shard) or (shard,) over data and context; `None` if they have one rank."""
    replicate: int
    """Ranks along data and context that hold the same shard of a parameter."""
    shard: int
    shard_index: int
    ends: dist.ProcessGroup | None
    """First and last pipeline rank with this rank's other indices, for a head tied to the embedding."""


def alone() -> Mesh:
    """The mesh of a single process."""
    one = MeshAxis(0, 1, None)
    return Mesh(one, one, one, one, one, None, 1, 1, 0, None)


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
    sharding, shard_index = None, 0
    if columns > 1:
        names = ("pipeline", "replicate", "shard", "tensor")
        sub_mesh = init_device_mesh(
            device_type, (parallel.pipeline, replicate, shard, parallel.tensor), mesh_dim_names=names
        )
        sharding = sub_mesh["shard"] if replicate == 1 else sub_mesh["replicate", "shard"]
        shard_index = sub_mesh.get_local_rank("shard")
    ends = None
    if parallel.pipeline > 1:
        width = world // parallel.pipeline
        pairs = [[column, world - width + column] for column in range(width)]
        ends, _ = dist.new_subgroups_by_enumeration(pairs)
    all_ranks = MeshAxis(dist.get_rank(), world, dist.group.WORLD)
    return Mesh(**axes, world=all_ranks, sharding=sharding, replicate=replicate, shard=shard, shard_index=shard_index,
                ends=ends)  # fmt: skip
