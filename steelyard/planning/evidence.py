"""Measurements that correct a prediction: ranks of `steelyard plan measure`, and the calibration of a site.

A measured rank gives factors, measured / predicted seconds, for layouts whose ranks compute the same layer: the same
GPU, degrees of tensor, context and expert parallelism, micro-batch and recomputation. Other layouts on this GPU get the
factors of the nearest one, so that they are compared on the same scale. Its peak memory replaces the predicted memory
of the layout that was measured. The factors of a site hold for a GPU that has no measured rank and no profile.

Factors belong to the program that was measured: they are its losses as much as those of the hardware. Predictions of
another program leave them out. Measured rates of products, copies and links, and the speed of the host, hold for all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from steelyard.planning.cluster import Cluster
    from steelyard.planning.cost_table import StageCost, UnitCost
    from steelyard.planning.layout import Layout
    from steelyard.planning.measured_layers import Profile
    from steelyard.sizes.memory import Memory

OWN = "steelyard"  # the program that `steelyard plan measure` and `plan --check` measure
LayoutKey = tuple[object, ...]


class WorkKey(NamedTuple):
    """What the work of a layer on a rank depends on."""

    gpu: str
    tensor: int
    context: int
    expert: int
    micro_batch: int
    sequence_parallel: bool
    recompute: str | int

    def distance(self, other: WorkKey) -> float:
        """How much another rank's work differs: in the logarithms of its degrees, and in what else differs."""
        degrees = zip(self[1:5], other[1:5], strict=True)
        others = sum(one != two for one, two in zip(self[5:], other[5:], strict=True))
        return sum(abs(math.log(one / two)) for one, two in degrees) + others


@dataclass(frozen=True)
class Factors:
    """Measured / predicted seconds of compute, and of the optimizer."""

    forward: float = 1.0
    backward: float = 1.0
    optimizer: float = 1.0


@dataclass(frozen=True)
class Evidence:
    """All measurements of a plan."""

    work: Mapping[WorkKey, Factors] = field(default_factory=dict)
    site: Mapping[str, Factors] = field(default_factory=dict)
    """By GPU."""
    peaks: Mapping[tuple[LayoutKey, int], int] = field(default_factory=dict)
    """Measured bytes of a pipeline rank of a layout."""
    overhead: float = 0.0
    """Seconds per step that a site adds: data, and what else no phase explains."""
    inside: Mapping[str, float] = field(default_factory=dict)
    """Measured / predicted seconds of communication inside nodes, by type."""
    network: Mapping[frozenset[str], float] = field(default_factory=dict)
    """The same between nodes, by their types."""
    software: str = OWN
    """The program that was measured."""
    calibration: str = ""
    """Which stored calibration is used, or why it is not."""

    def with_(self, other: Evidence) -> Evidence:
        """Both; where both have a measurement, the other one counts."""
        return Evidence(
            {**self.work, **other.work}, {**self.site, **other.site}, {**self.peaks, **other.peaks},
            self.overhead + other.overhead, {**self.inside, **other.inside}, {**self.network, **other.network},
            other.software, other.calibration or self.calibration,
        )  # fmt: skip

    def beside(self, gpus: Collection[str], types: Collection[str]) -> Evidence:
        """What counts beside profiles of these GPUs, which have measured the links inside nodes of these types."""
        return replace(
            self,
            site={gpu: factors for gpu, factors in self.site.items() if gpu not in gpus},
            inside={type_: factor for type_, factor in self.inside.items() if type_ not in types},
        )

    def factors(self, layout: Layout, gpu: str) -> Factors | None:
        """Those of the nearest measurement on a GPU, or else of its site."""
        return self._nearest(work_key(layout, gpu)) or self.site.get(gpu)

    def corrected(self, cost: StageCost, layout: Layout, gpu: str) -> StageCost:
        """The cost of a pipeline rank with these factors."""
        factors = self.factors(layout, gpu)
        if factors is None:
            return cost
        update = tuple(replace(each, bytes=each.bytes * factors.optimizer) for each in cost.update)
        layer, embedding, head = (_scaled(part, factors) for part in (cost.layer, cost.embedding, cost.head))
        return type(cost)(layer, embedding, head, update)

    def _nearest(self, key: WorkKey) -> Factors | None:
        near = [known for known in self.work if known.gpu == key.gpu]
        return self.work[min(near, key=key.distance)] if near else None

    def measured(self, memories: list[Memory], layout: Layout, ranks: Sequence[int]) -> list[Memory]:
        """Predicted memories; where a rank was measured, their sum is its peak."""
        if not self.peaks:
            return memories
        key = layout_key(layout)
        found = [self.peaks.get((key, rank)) for rank in ranks]
        return [
            memory if peak is None else replace(memory, not_at_once=memory.not_at_once + peak - memory.total)
            for memory, peak in zip(memories, found, strict=True)
        ]


def _scaled(cost: UnitCost, factors: Factors) -> UnitCost:
    """A unit whose compute takes `factors` times as long; communication stays as it is."""
    shared = (cost.exchange + cost.expert) / 2
    forward, backward = min(shared, cost.forward), min(shared, cost.backward)
    return replace(
        cost,
        forward=forward + (cost.forward - forward) * factors.forward,
        backward=backward + (cost.backward - backward) * factors.backward,
        host_forward=cost.host_forward * factors.forward,
        host_backward=cost.host_backward * factors.backward,
        weights=cost.weights * factors.backward,
    )


def work_key(layout: Layout, gpu: str) -> WorkKey:
    """The work of a layout's ranks on a GPU."""
    return WorkKey(
        gpu, layout.tensor, layout.context, layout.expert, layout.micro_batch, layout.sequence_parallel,
        layout.recompute,
    )  # fmt: skip


def layout_key(layout: Layout) -> LayoutKey:
    """A layout without its placement: its memory does not depend on that."""
    return (
        layout.tensor, layout.context, layout.expert, layout.pipeline, layout.virtual, layout.data, layout.zero,
        layout.sequence_parallel, layout.schedule, layout.micro_batch, layout.recompute, layout.partition,
    )  # fmt: skip


def measured_cluster(cluster: Cluster, profiles: Mapping[str, Profile], software: str) -> Cluster:
    """The cluster with measured links inside its nodes, where its file gives none, and the evidence of one program.

    `profiles` by GPU; they count before the factors of a site.
    """
    found = [(nodes, cluster.gpu_of(nodes)) for nodes in cluster.nodes]
    changed = [
        nodes if (profile := profiles.get(gpu.name)) is None else profile.with_link(nodes, gpu) for nodes, gpu in found
    ]
    linked = {new.type for new, old in zip(changed, cluster.nodes, strict=True) if new != old}
    evidence = cluster.evidence if cluster.evidence.software == software else Evidence()
    evidence = evidence.beside(profiles, linked)
    if not linked and evidence == cluster.evidence:
        return cluster
    return cluster.with_nodes(changed).with_only(evidence)
