"""The mesh: which rank holds which part of the model and of the batch.

    rank = ((pipeline x data + data) x context + context) x tensor + tensor

Parameters are shared out over data and context together: both see other tokens of the same step. What is sharded and
what only replicated along those ranks follows from `zero`, so the mesh for that is cut as (replicate, shard).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steelyard.core.recipe.parallel_section import ParallelSection

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class MeshAxis:
    """This rank's place along one axis of the mesh."""

    index: int
    size: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the world. With one rank there are no process groups at all."""

    pipeline: MeshAxis
    data: MeshAxis
    context: MeshAxis
    tensor: MeshAxis
    world: MeshAxis
    sharding: DeviceMesh | None
    """(replicate, shard) or (shard,) over data and context; none when they are one rank."""
    replicate: int
    """Ranks along data and context that hold the same part of a parameter."""
    shard: int
    shard_index: int
    ends: dist.ProcessGroup | None
    """First and last pipeline rank of this rank's column, for a head tied to the embedding."""


def alone() -> Mesh:
    """The mesh of a single process."""
    one = MeshAxis(0, 1, None)
    return Mesh(one, one, one, one, one, None, 1, 1, 0, None)


def make(parallel: ParallelSection, device_type: str) -> Mesh:
    """The mesh of a plan over all ranks of the default process group."""
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
        cut = init_device_mesh(
            device_type, (parallel.pipeline, replicate, shard, parallel.tensor), mesh_dim_names=names
        )
        sharding = cut["shard"] if replicate == 1 else cut["replicate", "shard"]
        shard_index = cut.get_local_rank("shard")
    ends = None
    if parallel.pipeline > 1:
        width = world // parallel.pipeline
        pairs = [[column, world - width + column] for column in range(width)]
        ends, _ = dist.new_subgroups_by_enumeration(pairs)
    everyone = MeshAxis(dist.get_rank(), world, dist.group.WORLD)
    return Mesh(**axes, world=everyone, sharding=sharding, replicate=replicate, shard=shard, shard_index=shard_index,
                ends=ends)  # fmt: skip
