"""How far a prediction may be off.

The range of a step follows from the evidence of its parts. Each part has a relative error (one standard deviation of
its logarithm) by what is known about it: a layer measured on this GPU, a rate of products that was measured or
published, one that was extrapolated, a link that the cluster file gives, or a default. A layer that waits for its host
depends on how fast that host launches kernels, and not on the GPU. Errors of parts that have different causes are
independent: they add as squares, weighted by the share of the part in the step. The errors were set on measured steps
whose group was not in the fit (docs/plan.md), so that 80% of them are inside their range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steelyard.planning.cluster import Cluster, Nodes
from steelyard.planning.layout import Layout

if TYPE_CHECKING:
    from steelyard.planning.cost_table import Parts
    from steelyard.planning.measured_layers import Profile

Z80 = 1.2816  # Four fifths of a normal distribution are within this many standard deviations.
# Errors of a part by its evidence. `measured`: on this GPU with this model.
COMPUTE = {"measured": 0.04, "calibrated": 0.06, "extrapolated": 0.13}
# Of launches: two hosts of a kind differ by 13 to 19%, and the speed of one by as much between minutes (docs/plan.md).
HOST = {"given": 0.1, "default": 0.2}
LINK = {"given": 0.25, "default": 0.5}
SHARED = 0.05  # of the whole step: what no part explains, such as the choice of kernels


@dataclass(frozen=True)
class Range:
    """The 80% range of a step's seconds, or of what is proportional to them, and the weakest evidence behind it."""

    low: float
    high: float
    evidence: str

    def overlaps(self, other: Range) -> bool:
        """Whether the two values may be the same."""
        return self.low <= other.high and other.low <= self.high

    def contains(self, value: float) -> bool:
        """Whether a value is inside."""
        return self.low <= value <= self.high

    def scaled(self, factor: float) -> Range:
        """The range of a figure that is `factor` times this one: the relative width is the same."""
        return Range(self.low * factor, self.high * factor, self.evidence)

    def __str__(self) -> str:
        low, high = (f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in (self.low, self.high))
        return f"{low} to {high}"


def range_of(
    cluster: Cluster, profiles: Mapping[str, Profile], layout: Layout, parts: Parts, host_share: float
) -> Range:
    """The range of a predicted step; `host_share` is that of its layers (`StepCost.host_share`)."""
    types = [cluster.nodes_of(type_) for type_ in dict.fromkeys(type_ for type_, _ in layout.placement)]
    kinds = [_gpu_evidence(cluster, nodes, profiles) for nodes in types]
    compute = max(kinds, key=lambda kind: COMPUTE[kind])
    inside = "given" if all(_knows_inside(cluster, nodes) for nodes in types) else "default"
    several = sum(count for _, count in layout.placement) > 1
    links = [cluster.link(one, other) for one in types for other in types] if several else []
    across = "default" if any(link is None or link.transport is None for link in links) else "given"
    tensor_crosses = layout.tensor > min(nodes.gpus for nodes in types)
    passes, update = parts.compute + parts.bubble, parts.optimizer + parts.overhead
    near, far = (0.0, parts.tensor) if tensor_crosses else (parts.tensor, 0.0)
    far += parts.gradient + parts.pipeline + parts.expert
    hosts = "given" if all(nodes.host_operation_us is not None for nodes in types) else "default"
    gpu_share, host = 1 - host_share, COMPUTE["measured"] if compute == "measured" else HOST[hosts]
    errors = (
        (gpu_share * passes + update) * COMPUTE[compute],
        host_share * (passes + near) * host,
        gpu_share * near * LINK[inside],
        far * LINK[across if several else inside],
    )
    sigma = math.hypot(SHARED, *(error / parts.total for error in errors))
    # A default is named where it matters: where its part of the step is more than a twentieth.
    weak = [each for each, share in ((inside, near), (across, far)) if share > parts.total / 20]
    evidence = "default" if "default" in weak else compute
    spread = math.exp(Z80 * sigma)
    return Range(parts.total / spread, parts.total * spread, evidence)


def _gpu_evidence(cluster: Cluster, nodes: Nodes, profiles: Mapping[str, Profile]) -> str:
    gpu = cluster.gpu_of(nodes)
    evidence = cluster.evidence
    if gpu.name in profiles or gpu.name in evidence.site or any(key.gpu == gpu.name for key in evidence.work):
        return "measured"
    known = gpu.evidence[0] in ("measured", "published") or (
        gpu.evidence[0] == "given" and _gives_share(cluster, nodes)
    )
    return "calibrated" if known else "extrapolated"


def _gives_share(cluster: Cluster, nodes: Nodes) -> bool:
    return any(own.name == nodes.gpu and "sustained" in own.model_fields_set for own in cluster.gpus)


def _knows_inside(cluster: Cluster, nodes: Nodes) -> bool:
    """Whether the link inside a node is in the file, or is NVLink, whose bandwidth is that of the GPU."""
    return nodes.gpus == 1 or nodes.intra_GBps is not None or cluster.inside(nodes).transport == "nvlink"
