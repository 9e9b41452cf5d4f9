"""Whether a layout fits in memory: what the training program allocates per pipeline rank against what the GPU has.

Steelyard's own memory is `sizes.memory`, that of other programs `megatron_memory` and `torchtitan_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from steelyard.core import units
from steelyard.core.recipe.parallel_section import Partition
from steelyard.planning import megatron_memory, torchtitan_memory
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout, Seat
from steelyard.planning.predict import Predictor
from steelyard.planning.software import TORCHTITAN
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.sizes.memory import RESERVED, Memory

# Of a process, beside what PyTorch's allocator reserves: the context, loaded kernels, and NCCL's buffers, which are
# larger with NVLink's many channels (fitted).
OUTSIDE_GIB = {"nvlink": 4.2, "pcie": 2.4, "rdma": 2.4, "tcp": 2.4}


@dataclass(frozen=True)
class Room:
    """The memory that a pipeline rank needs, and the memory that its GPUs have for tensors."""

    rank: int
    memory: Memory
    usable: int
    gpu: str
    host: int = 0
    """Bytes of host memory on a node, if all its ranks need as much as this one."""
    host_usable: int | None = None

    @property
    def fits(self) -> bool:
        """Whether GPU memory and host memory are sufficient."""
        return self.memory.total <= self.usable and (self.host_usable is None or self.host <= self.host_usable)


def rooms(predictor: Predictor, layout: Layout, ranks: Sequence[int] | None = None) -> list[Room]:
    """One `Room` for each pipeline rank, or for the given ranks."""
    ranks = range(layout.pipeline) if ranks is None else ranks
    memories = memories_of(predictor, layout, ranks)
    limits = predictor.each_kind("memory", layout, partial(_limit, predictor.cluster))
    return [
        Room(rank, memory, limits[rank].usable, limits[rank].gpu, memory.host * limits[rank].gpus, limits[rank].host)
        for rank, memory in zip(ranks, memories, strict=True)
    ]


def memories_of(predictor: Predictor, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """The memory of some pipeline ranks under the predictor's software."""
    if predictor.software.scores:
        step = predictor.step(layout)
        return megatron_memory.memories(predictor.recipe, predictor.software, step, layout, ranks)
    if predictor.software.name == TORCHTITAN.name:
        return torchtitan_memory.memories(predictor.recipe, layout, predictor.micro_batches(layout), ranks)
    memories = predictor.rank_memory(layout).of(Partition(layout.partition), ranks)
    return predictor.cluster.evidence.measured(memories, layout, ranks)


class _Limit(NamedTuple):
    """What the nodes of a pipeline rank have: bytes for tensors, GPUs per node, and host memory if it is known."""

    usable: int
    gpu: str
    gpus: int
    host: int | None


def _limit(cluster: Cluster, seats: Sequence[Seat]) -> _Limit:
    gpus = {seat.nodes.type: cluster.gpu_of(seat.nodes) for seat in seats}.values()
    smallest = min(gpus, key=lambda gpu: gpu.memory or 0)
    known = [seat.nodes.host_gib for seat in seats if seat.nodes.host_gib is not None]
    has = int(min(known) * GIB) if known else None
    return _Limit(usable(smallest.memory or 0), smallest.name, max(seat.nodes.gpus for seat in seats), has)


def deciding_ranks(predictor: Predictor, layout: Layout) -> list[int]:
    """The pipeline ranks that decide whether a layout fits: of ranks with the same GPUs and layers the fullest ones.

    The first and last rank of the pipeline are always included, because they hold the embedding and the head. Among the
    others, the first keeps the most micro-batches, and the last keeps the most that wait for their weight gradients. If
    layers differ, all ranks decide.
    """
    if len({layer.mlp for layer in predictor.recipe.model.blocks.layers}) > 1:
        return list(range(layout.pipeline))
    alike: dict[tuple[object, ...], list[int]] = {}
    ends = (0, layout.pipeline - 1)
    for rank, kinds in enumerate(predictor.each_kind("types", layout, _types)):
        layers = layout.partition[rank :: layout.pipeline]
        alike.setdefault((kinds, layers, rank if rank in ends else None), []).append(rank)
    late = layout.schedule == "zero-bubble"
    return sorted({rank for same in alike.values() for rank in ((same[0], same[-1]) if late else (same[0],))})


def _types(seats: Sequence[Seat]) -> tuple[str, ...]:
    return tuple(sorted({seat.nodes.type for seat in seats}))


def fits(predictor: Predictor, layout: Layout) -> bool:
    """Whether the layout fits on every rank."""
    return all(room.fits for room in rooms(predictor, layout, deciding_ranks(predictor, layout)))


def usable(memory: int) -> int:
    """Bytes of a device that are available for tensors; a process reserves less on a small device."""
    return memory - min(RESERVED, memory // 8)


def of_process(tensors: int, cluster: Cluster) -> int:
    """Bytes that the driver counts for a process whose tensors have this size: gaps, and what is outside PyTorch."""
    outside = max(OUTSIDE_GIB[cluster.inside(nodes).transport] for nodes in cluster.nodes)
    return int(tensors * (1 + torchtitan_memory.FRAGMENTATION) + outside * GIB)


def lacking(found: list[Room]) -> int:
    """Bytes that the fullest rank, or a node's host memory, has too few."""
    hosts = [room.host - room.host_usable for room in found if room.host_usable is not None]
    return max([room.memory.total - room.usable for room in found] + hosts)


def reason(found: list[Room]) -> str | None:
    """Why a layout does not fit; None if it fits."""
    room = max(found, key=lambda room: room.memory.total - room.usable)
    for each in found:
        if each.host_usable is not None and each.host > each.host_usable:
            what = "checkpoint.memory_every needs" if each.memory.memory_copies else "optim.offload needs"
            if each.memory.host > each.memory.memory_copies > 0:
                what = "optim.offload and checkpoint.memory_every need"
            return (
                f"{what} {units.size(each.host)} of host memory per node at pipeline rank {each.rank}, "
                f"but a node has {units.size(each.host_usable)}"
            )
    if room.fits:
        return None
    kind, most = max(room.memory.by_kind().items(), key=lambda item: item[1])
    return (
        f"{units.size(room.memory.total - room.usable)} too much: pipeline rank {room.rank} needs "
        f"{units.size(room.memory.total)}, but {room.gpu} has {units.size(room.usable)}; the largest part is "
        f"{kind.replace('_', ' ')} ({units.size(most)})"
    )
