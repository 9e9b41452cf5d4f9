"""Whether a layout fits: the memory of each pipeline rank (`sizes.memory`) against the smallest GPU that it lies on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.core import units
from steelyard.plan import megatron_memory, torchtitan_memory
from steelyard.plan.layout import Layout, Seat
from steelyard.plan.predict import Predictor
from steelyard.plan.software import TORCHTITAN
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.sizes.memory import RESERVED, Memory, memory_of


@dataclass(frozen=True)
class Room:
    """What a pipeline rank needs, and what its GPUs have for tensors."""

    rank: int
    memory: Memory
    usable: int
    gpu: str
    host: int = 0
    """Bytes of the node's own memory, if all its ranks take as much of it as this one."""
    host_usable: int | None = None

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.memory.total <= self.usable and (self.host_usable is None or self.host <= self.host_usable)


def rooms(predictor: Predictor, layout: Layout, ranks: Sequence[int] | None = None) -> list[Room]:
    """One for each pipeline rank, or for those asked for."""
    ranks = range(layout.pipeline) if ranks is None else ranks
    memories = memories_of(predictor, layout, ranks)
    placed = predictor.seats(layout)
    found = []
    for rank, memory in zip(ranks, memories, strict=True):
        found.append(room(predictor, rank, memory, placed[rank]))
    return found


def memories_of(predictor: Predictor, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """What the program that trains holds on some of the pipeline ranks."""
    if predictor.software.scores:
        return megatron_memory.memories(predictor, layout, ranks)
    if predictor.software.name == TORCHTITAN.name:
        return torchtitan_memory.memories(predictor, layout, ranks)
    return memory_of(layout.applied(predictor.recipe), layout.world, ranks)


def room(predictor: Predictor, rank: int, memory: Memory, seats: Sequence[Seat]) -> Room:
    """What a pipeline rank on these seats needs, and has."""
    gpus = {seat.nodes.type: predictor.cluster.gpu_of(seat.nodes) for seat in seats}.values()
    smallest = min(gpus, key=lambda gpu: gpu.memory or 0)
    host = max(memory.host * seat.nodes.gpus for seat in seats)
    known = [seat.nodes.host_gib for seat in seats if seat.nodes.host_gib is not None]
    has = int(min(known) * GIB) if known else None
    return Room(rank, memory, usable(smallest.memory or 0), smallest.name, host, has)


def telling(predictor: Predictor, layout: Layout) -> list[int]:
    """The ranks that decide whether a layout fits: of those on like GPUs with like layers the first and the last.

    Both ends of the pipeline are looked at, for they hold embedding and head. Of the others the first keeps the most
    micro-batches waiting, the last the most that wait for their weights' gradients.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    ends = (0, layout.pipeline - 1)
    for rank, seats in enumerate(predictor.seats(layout)):
        kinds = tuple(sorted({seat.nodes.type for seat in seats}))
        layers = layout.partition[rank :: layout.pipeline]
        alike.setdefault((kinds, layers, rank if rank in ends else None), []).append(rank)
    late = layout.schedule == "zero-bubble"
    return sorted({rank for same in alike.values() for rank in ((same[0], same[-1]) if late else (same[0],))})


def fits(predictor: Predictor, layout: Layout) -> bool:
    """Whether every rank does."""
    return all(room.fits for room in rooms(predictor, layout, telling(predictor, layout)))


def usable(memory: int) -> int:
    """Bytes for tensors on a device: a process takes some for itself, of a small device (a share of a host) less."""
    return memory - min(RESERVED, memory // 8)


def reason(found: list[Room]) -> str | None:
    """Why a layout does not fit; None where it does."""
    room = max(found, key=lambda room: room.memory.total - room.usable)
    for each in found:
        if each.host_usable is not None and each.host > each.host_usable:
            return (
                f"optim.offload needs {units.size(each.host)} of a node's memory at pipeline rank {each.rank}, and it "
                f"has {units.size(each.host_usable)}"
            )
    if room.fits:
        return None
    kind, most = max(room.memory.by_kind().items(), key=lambda item: item[1])
    return (
        f"pipeline rank {room.rank} needs {units.size(room.memory.total)} and {room.gpu} has {units.size(room.usable)} "
        f"for it, most of it {kind.replace('_', ' ')} ({units.size(most)})"
    )
