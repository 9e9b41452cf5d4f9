"""How far a prediction may be off, what it assumes, and which nodes a plan leaves idle.

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

from steelyard.planning.cluster import DEFAULT_LINK, HOST_OPERATION_US, LATENCY_US, Cluster, Link, Nodes
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
    """The 80% range of a step's seconds, and the weakest evidence that it rests on."""

    low: float
    high: float
    evidence: str

    def overlaps(self, other: Range) -> bool:
        """Whether the two steps may take the same time."""
        return self.low <= other.high and other.low <= self.high

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


def assumptions(cluster: Cluster, layout: Layout | None = None) -> list[str]:
    """Every default that a prediction uses because the cluster file does not give a value, in the order of the file."""
    used = cluster.by_type if layout is None else dict.fromkeys(type_ for type_, _ in layout.placement)
    nodes = [each for each in cluster.nodes if each.type in used]
    found: list[str] = []
    for each in nodes:
        found += _assumed_of_nodes(cluster, each)
    several = sum(each.count for each in nodes) > 1
    pairs = [(one, other) for number, one in enumerate(nodes) for other in nodes[number:]] if several else []
    for one, other in pairs:
        if one is not other or one.count > 1:
            found += _assumed_of_link(one, other, cluster.link(one, other))
    return list(dict.fromkeys(found))


def _assumed_of_nodes(cluster: Cluster, nodes: Nodes) -> list[str]:
    gpu, inside = cluster.gpu_of(nodes), cluster.inside(nodes)
    kind, source = gpu.evidence
    own = next((each for each in cluster.gpus if each.name == nodes.gpu), None)
    found = []
    if own is not None:
        missing = [key for key in ("sustained", "units", "link_gb") if key not in own.model_fields_set]
        found += [f"GPU {gpu.name}: {key} = {getattr(gpu, key):g} (default)" for key in missing]
    elif kind == "extrapolated":
        found.append(f"GPU {gpu.name}: products sustain {gpu.sustained:g} of the peak (extrapolated: {source})")
    if nodes.host_operation_us is None:
        found.append(
            f"nodes {nodes.type}: the host takes {HOST_OPERATION_US:g} us for a small operation (default); "
            "set host_operation_us, which `steelyard plan measure` prints"
        )
    if nodes.gpus > 1 and nodes.intra_GBps is None:
        rate = f"{inside.bandwidth / 1e9:g} GB/s over {inside.transport}"
        shared = f", of which {nodes.gpus} GPUs share the root ports" if inside.transport == "pcie" else ""
        found.append(f"nodes {nodes.type}: {rate} from a GPU to the others (catalogue{shared}); set intra_GBps")
    if nodes.price_hour is None:
        found.append(f"nodes {nodes.type}: no price_hour, so plans on them have no price")
    return found


def _assumed_of_link(one: Nodes, other: Nodes, link: Link | None) -> list[str]:
    between = f"within {one.type}" if one is other else f"between {one.type} and {other.type}"
    if link is None:
        return [f"network {between}: {DEFAULT_LINK.GBps:g} GB/s Ethernet through sockets; add a [[links]] table"]
    found = []
    if link.transport is None:
        found.append(f'network {between}: sockets (transport = "tcp"); set transport = "rdma" if it has GPUDirect RDMA')
    if link.latency_us is None:
        found.append(f"network {between}: latency_us = {LATENCY_US[link.transport or 'tcp']:g}")
    return found


@dataclass(frozen=True)
class IdleNodes:
    """Nodes of the cluster that a plan does not use."""

    type: str
    count: int
    why: str


def idle_nodes(cluster: Cluster, layout: Layout, precision: str) -> list[IdleNodes]:
    """The nodes that a plan leaves idle, with the reason."""
    used: dict[str, int] = {}
    for type_, count in layout.placement:
        used[type_] = used.get(type_, 0) + count
    found = []
    for nodes in cluster.nodes:
        left, gpu = nodes.count - used.get(nodes.type, 0), cluster.gpu_of(nodes)
        if left > 0:
            lacks = gpu.peak(precision) is None
            why = f"{gpu.name} has no {precision}" if lacks else "no better plan uses them"
            found.append(IdleNodes(nodes.type, left, why))
    ranks = sum(cluster.nodes_of(type_).gpus * count for type_, count in layout.placement)
    if ranks > layout.world:
        type_ = layout.placement[-1][0]
        found.append(IdleNodes(type_, 1, f"{ranks - layout.world} GPUs of its last node are not in the mesh"))
    return found
