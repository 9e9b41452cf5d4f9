"""A layout: everything that `steelyard plan` chooses, and the nodes of a cluster that its ranks run on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import ParallelSection, Partition
from steelyard.planning.cluster import Cluster, Nodes, Placement


@dataclass(frozen=True)
class Layout:
    """The degrees of the mesh and the other keys of `[parallel]`, and `train.micro_batch`."""

    tensor: int
    context: int
    pipeline: int
    virtual: int
    data: int
    zero: int
    sequence_parallel: bool
    schedule: str
    micro_batch: int
    recompute: str | int
    partition: tuple[int, ...]
    placement: Placement
    """Nodes in rank order: type, and number of nodes."""
    expert: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def stage_ranks(self) -> int:
        """Ranks that share one pipeline rank."""
        return self.tensor * self.context * self.data

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed in separate passes."""
        return self.schedule == "zero-bubble" and self.pipeline > 1

    def with_partition(self, counts: tuple[int, ...]) -> Layout:
        """The layout with other layers per stage."""
        return replace(self, partition=counts)

    def settings(self) -> dict[str, Any]:
        """The keys of a recipe's `[parallel]`."""
        return {
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
            "pipeline": self.pipeline,
            "virtual": self.virtual,
            "data": self.data,
            "zero": self.zero,
            "sequence_parallel": self.sequence_parallel,
            "schedule": self.schedule,
            "partition": str(Partition(self.partition)),
            "placement": [f"{type_}:{count}" for type_, count in self.placement],
            "recompute": self.recompute,
        }

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe under this layout, not validated again, because a search does this thousands of times."""
        settings = self.settings() | {"partition": Partition(self.partition)}
        parallel = ParallelSection.model_construct(**(recipe.parallel.model_dump() | settings))
        train = recipe.train.model_copy(update={"micro_batch": self.micro_batch})
        return recipe.model_copy(update={"parallel": parallel, "train": train})

    def written(self, recipe: Recipe) -> Recipe:
        """The recipe under this layout, validated, as `--write` writes it for `steelyard train`.

        Only Megatron runs 1F1B with fewer micro-batches than pipeline ranks; the recipe gets gpipe instead.
        """
        settings, train = recipe.settings(), recipe.train
        smallest = train.batch_ramp.start if train.batch_ramp else train.global_batch
        short = self.schedule == "1f1b" and smallest // (self.micro_batch * self.data) < self.pipeline
        schedule = {"schedule": "gpipe"} if short else {}
        settings["parallel"] = settings.get("parallel", {}) | self.settings() | schedule
        settings["train"]["micro_batch"] = self.micro_batch
        if "steps" in settings["train"] and ("tokens" in settings["train"] or "samples" in settings["train"]):
            del settings["train"]["steps"]
        return Recipe.model_validate(settings)


def of_recipe(recipe: Recipe, cluster: Cluster, short: bool = False) -> Layout:
    """The layout in the recipe, on all nodes of the cluster or on those in `parallel.placement`.

    `short` allows 1F1B with fewer micro-batches than pipeline ranks, which Megatron supports and PyTorch does not. Some
    GPUs of the last node in the placement may stay idle.
    """
    from steelyard.sizes.least_recompute import with_least_recompute
    from steelyard.sizes.memory import RESERVED
    from steelyard.sizes.rank_check import data_ranks
    from steelyard.sizes.stage_layers import partition_of

    parallel = recipe.parallel
    placement = tuple(_entry(entry) for entry in parallel.placement) or tuple(
        (nodes.type, nodes.count) for nodes in cluster.nodes
    )
    unknown = [type_ for type_, _ in placement if type_ not in cluster.by_type]
    if unknown:
        raise UserError(
            f"the cluster has no nodes of type {unknown[0]}",
            where=recipe.where("parallel.placement"),
            hint=f"use one of {', '.join(cluster.by_type)}",
        )
    world = sum(cluster.nodes_of(type_).gpus * count for type_, count in placement)
    spare = cluster.nodes_of(placement[-1][0]).gpus if parallel.placement else world
    if parallel.data is not None and world - spare < parallel.least_world <= world:
        world = parallel.least_world
        placement = _holding(world, placement, cluster)
    gpus = sorted({cluster.gpu_by_type[type_] for type_, _ in placement}, key=lambda gpu: gpu.name)
    without = [gpu.name for gpu in gpus if gpu.peak(recipe.train.precision) is None]
    if without:
        raise lacking(recipe, without)
    memories = [gpu.memory for gpu in gpus if gpu.memory is not None]
    recompute = with_least_recompute(recipe, world, min(memories) - RESERVED if memories else None).parallel.recompute
    return Layout(
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        data=data_ranks(_with_gpipe(recipe) if short and parallel.schedule == "1f1b" else recipe, world),
        zero=parallel.zero,
        sequence_parallel=parallel.sequence_parallel,
        schedule=parallel.schedule,
        micro_batch=recipe.train.micro_batch,
        recompute=recompute,
        partition=partition_of(recipe).counts,
        placement=placement,
        expert=parallel.expert,
    )


def _with_gpipe(recipe: Recipe) -> Recipe:
    """The recipe with gpipe, which runs any number of micro-batches, to validate everything else."""
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"schedule": "gpipe"})})


def _holding(world: int, placement: Placement, cluster: Cluster) -> Placement:
    """The first nodes of a placement that together have `world` GPUs."""
    held: list[tuple[str, int]] = []
    for type_, count in placement:
        used = min(count, -(-world // cluster.nodes_of(type_).gpus))
        if used > 0:
            held.append((type_, used))
            world -= used * cluster.nodes_of(type_).gpus
    return tuple(held)


def placement_for(world: int, cluster: Cluster) -> list[str]:
    """Nodes for `world` ranks, in the form of `parallel.placement`.

    Nodes of the first type that has enough GPUs, so that all ranks are the same, or else the first nodes of the file.
    """
    for nodes in cluster.nodes:
        count, rest = divmod(world, nodes.gpus)
        if count <= nodes.count and (not rest or not count):
            return [f"{nodes.type}:{count or 1}"]
    everything = tuple((nodes.type, nodes.count) for nodes in cluster.nodes)
    return [f"{type_}:{count}" for type_, count in _holding(world, everything, cluster)]


def lacking(recipe: Recipe, gpus: list[str]) -> UserError:
    """The error for GPUs without a peak for the recipe's precision."""
    return UserError(
        f"no {recipe.train.precision} peak is known for {', '.join(gpus)}",
        where=recipe.where("train.precision"),
        hint="choose another precision, or define the GPU with its peak in a [[gpus]] table",
    )


def _entry(text: str) -> tuple[str, int]:
    type_, _, count = text.partition(":")
    if count and not count.isdigit():
        raise UserError(f"parallel.placement: {text} is not a type and a number of nodes", hint='write it like "a10:7"')
    return type_, int(count or 1)


class Seat(NamedTuple):
    """Consecutive ranks of one stage on one node; `node` is the index of the node in rank order."""

    node: int
    nodes: Nodes
    ranks: int


class Seats:
    """The node of each rank of a placement."""

    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        self.nodes: list[Nodes] = []
        for type_, count in placement:
            self.nodes += [cluster.nodes_of(type_)] * count
        self.ends: list[int] = []
        for nodes in self.nodes:
            self.ends.append((self.ends[-1] if self.ends else 0) + nodes.gpus)

    def of(self, first: int, ranks: int) -> tuple[Seat, ...]:
        """The seats of `ranks` ranks, starting at rank `first`."""
        seats, node = [], bisect_right(self.ends, first)
        while ranks > 0:
            here = min(ranks, self.ends[node] - first)
            seats.append(Seat(node, self.nodes[node], here))
            first, ranks, node = first + here, ranks - here, node + 1
        return tuple(seats)


def seat_kinds(seats: Sequence[Seat]) -> tuple[object, ...]:
    """What the cost of a pipeline rank depends on: types of nodes, ranks on each of them, and the number of nodes."""
    return (*{(seat.nodes.type, seat.ranks): None for seat in seats}, len(seats))


def seat_pairs(one: Sequence[Seat], other: Sequence[Seat]) -> list[tuple[Seat, Seat]]:
    """Seats that send to each other."""
    return [*zip(one, other, strict=False), (one[-1], other[-1])]


def link_kinds(one: Sequence[Seat], other: Sequence[Seat]) -> tuple[object, ...]:
    """What the time of a send between two pipeline ranks depends on."""
    return tuple({(a.nodes.type, b.nodes.type, a.node == b.node, a.ranks): None for a, b in seat_pairs(one, other)})
