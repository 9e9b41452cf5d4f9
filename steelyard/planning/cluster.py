"""The cluster file CLUSTER.toml: types of nodes, their GPUs, prices and power, and the links between them.

The format:

name = "campus"

[[nodes]]
type = "a10"               # any name; links and parallel.placement refer to it
count = 7
gpu = "a10"                # a name in sizes/gpu_catalogue.py or in a [[gpus]] table of this file
gpus = 4                   # per node
partition = "gpu2"         # Slurm names for `steelyard submit`; the planner does not use them
gres = "gpu:a10:4"
zone = "one"
price_hour = 3.2           # per node
intra_GBps = 16.0          # from one GPU to the others of its node, one way; default: the catalogue
intra_latency_us = 5.0     # latency of that link
intra_transport = "pcie"   # nvlink or pcie; default: the catalogue
idle_watts = 200           # of a node without its GPUs, for --objective energy
host_gib = 512             # host memory of a node, for optim.offload
host_GBps = 200.0          # bandwidth of the host memory
host_link_GBps = 25.0      # bandwidth between one GPU and the host
host_operation_us = 8.0    # what the host takes for one small operation of PyTorch; `plan measure` prints it

[[links]]
between = ["a10", "a100"]  # two types or zones; the same name twice: within it; "*": any
GBps = 12.5                # all network cards of one node together, one way
latency_us = 5.0           # default: 5 for rdma, 50 for tcp
transport = "rdma"         # rdma: InfiniBand or RoCE with GPUDirect; tcp: sockets of the hosts (the default)

[[gpus]]                   # a GPU that is not in the catalogue
name = "mine"
memory_gib = 16
fp16 = 50.0                # dense TFLOP/s
bandwidth_gb = 500.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PrivateAttr, ValidationError

from steelyard.core.errors import UserError
from steelyard.core.recipe.load import explained
from steelyard.core.recipe.section import PositiveInt, Section
from steelyard.core.recipe.toml import read
from steelyard.planning.evidence import Evidence
from steelyard.sizes.gpu_catalogue import CATALOGUE, Gpu, by_name

NETWORK_GBPS = 1.25  # 10 Gbit/s Ethernet: the default where no link is given
LATENCY_US = {"nvlink": 18.9, "pcie": 5.0, "rdma": 5.0, "tcp": 50.0}  # default latency of a message
ROOT_PORTS = 2  # x16 links from the GPUs of a node to its processors, one per socket
INTRA_GBPS = 16.0  # PCI Express 3.0 x16: the default of a GPU whose link is not known
# Defaults of a node: one socket with six channels of DDR4-2933, and PCI Express 3.0 x16.
HOST_GBPS, HOST_LINK_GBPS = 140.0, 15.75
HOST_OPERATION_US = 8.0  # the default: a core of 2.5 GHz of a rented x86 node
ANY = "*"
MOST_NODES, MOST_GPUS = 10_000, 256  # per type, and per node: a larger number is a typing error
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
# One CPU core with 256-bit vectors and its share of a desktop's memory, to plan small models on a laptop.
CORE = Gpu("cpu", "cpu", 4, 0.05, None, 0.025, 0.025, None, 8, 1, 15, 2, 0.6, "a core of a 2020s x86 processor")


Transport = Literal["nvlink", "pcie", "rdma", "tcp"]
Placement = tuple[tuple[str, int], ...]
"""Nodes in rank order: type, and number of nodes."""


@dataclass(frozen=True)
class Wire:
    """A link: bytes per second in one direction, latency in seconds, and what carries the messages."""

    bandwidth: float
    latency: float
    transport: Transport
    slower: float = 1.0
    """Measured / predicted seconds of communication over it."""


class OwnGpu(Section):
    """A GPU that is not in the catalogue. Peaks are dense, in TFLOP/s."""

    name: Name
    memory_gib: PositiveFloat
    fp32: PositiveFloat | None = None
    tf32: PositiveFloat | None = None
    fp16: PositiveFloat | None = None
    bf16: PositiveFloat | None = None
    fp8: PositiveFloat | None = None
    bandwidth_gb: PositiveFloat
    units: PositiveInt = 80
    watts: PositiveFloat | None = None
    link_gb: PositiveFloat = 16.0
    sustained: Annotated[float, Field(gt=0, le=1)] = 0.75

    def as_gpu(self, source: str) -> Gpu:
        """The GPU as a catalogue entry."""
        return Gpu(pattern=self.name, source=source, **self.model_dump())


class Nodes(Section):
    """Identical nodes."""

    type: Name
    count: Annotated[int, Field(gt=0, le=MOST_NODES)]
    gpu: str
    gpus: Annotated[int, Field(gt=0, le=MOST_GPUS)]
    partition: str | None = None
    gres: str | None = None
    zone: Name = "here"
    price_hour: NonNegativeFloat | None = None
    intra_GBps: PositiveFloat | None = None
    intra_latency_us: NonNegativeFloat | None = None
    intra_transport: Transport | None = None
    idle_watts: NonNegativeFloat = 0.0
    host_gib: PositiveFloat | None = None
    host_GBps: PositiveFloat = HOST_GBPS
    host_link_GBps: PositiveFloat = HOST_LINK_GBPS
    host_operation_us: Annotated[float, Field(gt=0, le=1000)] | None = None

    @property
    def host_slowness(self) -> float:
        """How long the host takes for its work, relative to the default."""
        return (self.host_operation_us or HOST_OPERATION_US) / HOST_OPERATION_US


class Link(Section):
    """The network between two types of nodes or two zones."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    GBps: PositiveFloat
    latency_us: NonNegativeFloat | None = None
    transport: Transport | None = None

    @property
    def wire(self) -> Wire:
        """The link with its defaults: sockets, and the latency of its transport."""
        transport = self.transport or "tcp"
        latency = LATENCY_US[transport] if self.latency_us is None else self.latency_us
        return Wire(self.GBps * 1e9, latency * 1e-6, transport)


DEFAULT_LINK = Link(between=[ANY, ANY], GBps=NETWORK_GBPS)


class Cluster(Section):
    """A cluster file."""

    name: str = "cluster"
    nodes: Annotated[list[Nodes], Field(min_length=1)]
    links: Annotated[list[Link], Field(default_factory=list)]
    gpus: Annotated[list[OwnGpu], Field(default_factory=list)]

    _file: str = PrivateAttr(default="cluster")
    _evidence: Evidence = PrivateAttr(default_factory=Evidence)

    @property
    def evidence(self) -> Evidence:
        """Measurements on these machines that correct predictions."""
        return self._evidence

    def with_evidence(self, evidence: Evidence) -> Cluster:
        """The cluster with these measurements, and those that it has."""
        return self.with_only(self._evidence.with_(evidence))

    def with_only(self, evidence: Evidence) -> Cluster:
        """The cluster with these measurements alone."""
        made = self.with_nodes(self.nodes)
        made._evidence = evidence
        return made

    @cached_property
    def by_type(self) -> dict[str, Nodes]:
        """The nodes of each type."""
        return {nodes.type: nodes for nodes in self.nodes}

    @cached_property
    def gpu_by_type(self) -> dict[str, Gpu]:
        """The GPU of each type of node; a [[gpus]] table overrides the catalogue."""
        own = {gpu.name: gpu.as_gpu(self._file) for gpu in self.gpus}
        found = {nodes.type: own.get(nodes.gpu) or by_name(nodes.gpu) for nodes in self.nodes}
        return {type_: CORE if gpu is None or gpu.memory is None else gpu for type_, gpu in found.items()}

    @cached_property
    def wires(self) -> dict[tuple[str, str], Wire]:
        """The network between each pair of node types."""
        found = {}
        for one, other in ((one, other) for one in self.nodes for other in self.nodes):
            wire, pair = (self.link(one, other) or DEFAULT_LINK).wire, (one.type, other.type)
            found[pair] = replace(wire, slower=self._evidence.network.get(frozenset(pair), 1.0))
        return found

    @cached_property
    def insides(self) -> dict[str, Wire]:
        """The link between the GPUs of each type of node, per GPU and one way."""
        slower = self._evidence.inside
        return {
            nodes.type: replace(_inside(nodes, self.gpu_by_type[nodes.type]), slower=slower.get(nodes.type, 1.0))
            for nodes in self.nodes
        }

    def with_nodes(self, nodes: list[Nodes], links: list[Link] | None = None) -> Cluster:
        """The cluster with other nodes. A new object, because a copy would keep the cached properties."""
        made = Cluster(name=self.name, nodes=nodes, links=self.links if links is None else links, gpus=self.gpus)
        made._file, made._evidence = self._file, self._evidence
        return made

    def nodes_of(self, type_: str) -> Nodes:
        """The nodes of a type."""
        return self.by_type[type_]

    def gpu_of(self, nodes: Nodes) -> Gpu:
        """The GPU of a node."""
        return self.gpu_by_type[nodes.type]

    def wire(self, one: Nodes, other: Nodes) -> Wire:
        """The network between two nodes."""
        return self.wires[one.type, other.type]

    def inside(self, nodes: Nodes) -> Wire:
        """The link between the GPUs of a node, per GPU and one way."""
        return self.insides[nodes.type]

    def link(self, one: Nodes, other: Nodes) -> Link | None:
        """The most specific link between two nodes: a type before a zone before "*"; None if the file has none."""
        best, closeness = None, -1
        for link in self.links:
            first, second = link.between
            for left, right in ((first, second), (second, first)):
                near = _closeness(left, one), _closeness(right, other)
                if min(near) >= 0 and sum(near) > closeness:
                    best, closeness = link, sum(near)
        return best

    def check_objective(self, objective: str) -> None:
        """Refuse an objective whose price or power the file does not give for all nodes."""
        if objective in ("cost", "pareto"):
            what, unknown = "price", [nodes.type for nodes in self.nodes if nodes.price_hour is None]
            hint = "set price_hour in every [[nodes]] table, or use the objective time or energy"
        elif objective == "energy":
            what, unknown = "power", sorted({gpu.name for gpu in self.gpu_by_type.values() if gpu.watts is None})
            hint = "set watts in every [[gpus]] table, or use the objective time or cost"
        else:
            return
        if unknown:
            raise UserError(f"the {what} of {', '.join(unknown)} is not known", where=self._file, hint=hint)

    def price_hour(self, placement: Placement) -> float | None:
        """The price of the nodes per hour; None if the price of one is unknown."""
        prices = [(self.nodes_of(type_).price_hour, number) for type_, number in placement]
        if any(price is None for price, _ in prices):
            return None
        return sum((price or 0.0) * number for price, number in prices)

    def watts(self, placement: Placement) -> float | None:
        """The power of the nodes under load; None if that of a GPU is unknown."""
        total = 0.0
        for type_, number in placement:
            nodes = self.nodes_of(type_)
            each = self.gpu_of(nodes).watts
            if each is None:
                return None
            total += number * (nodes.idle_watts + nodes.gpus * each)
        return total

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return sum(nodes.count * nodes.gpus for nodes in self.nodes)


def load(path: str | Path) -> Cluster:
    """Read and validate a cluster file."""
    values, places = read(path, "a cluster file")
    try:
        cluster = Cluster.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, str(path), Cluster) from None
    cluster._file = str(path)
    _refuse(cluster, places)
    return cluster


def _refuse(cluster: Cluster, places: dict[str, str]) -> None:
    types = [nodes.type for nodes in cluster.nodes]
    names = {*types, *(nodes.zone for nodes in cluster.nodes), ANY}
    own = {gpu.name for gpu in cluster.gpus}
    for number, nodes in enumerate(cluster.nodes):
        if types.index(nodes.type) != number:
            raise UserError(
                f"the node type {nodes.type} is defined twice",
                where=places.get(f"nodes.{number}.type"),
                hint="rename one of them, or merge the two tables and add their counts",
            )
        if nodes.gpu not in own and by_name(nodes.gpu) is None:
            known = ", ".join(gpu.name for gpu in CATALOGUE)
            raise UserError(
                f"the GPU {nodes.gpu} is not known",
                where=places.get(f"nodes.{number}.gpu"),
                hint="describe it in a [[gpus]] table: memory_gib, the dense TFLOP/s of train.precision (bf16, fp16, "
                "fp8 or fp32) and bandwidth_gb of its memory are needed; sustained (`steelyard plan profile` measures "
                f"it), link_gb, units and watts make the plan better. Or use one of {known}",
            )
    for number, gpu in enumerate(cluster.gpus):
        if gpu.name in [each.name for each in cluster.gpus[:number]]:
            raise UserError(f"the GPU {gpu.name} is defined twice", where=places.get(f"gpus.{number}.name"))
        if gpu.fp8 is not None and gpu.bf16 is None:
            raise UserError(
                f"the GPU {gpu.name} has fp8 without bf16",
                where=places.get(f"gpus.{number}.fp8"),
                hint="set bf16 too: attention and the head compute in bf16 when train.precision is fp8",
            )
    for number, link in enumerate(cluster.links):
        if sorted(link.between) in [sorted(each.between) for each in cluster.links[:number]]:
            raise UserError(
                f"the link between {' and '.join(link.between)} is defined twice",
                where=places.get(f"links.{number}.between"),
            )
        for name in link.between:
            if name not in names:
                raise UserError(
                    f"the link refers to {name}, which is neither a node type nor a zone",
                    where=places.get(f"links.{number}.between"),
                    hint=f"use one of {', '.join(sorted(names))}",
                )


def _inside(nodes: Nodes, gpu: Gpu) -> Wire:
    """The link between the GPUs of a node; what the file does not give comes from the catalogue.

    GPUs on PCI Express talk through the processors: more than `ROOT_PORTS` of them share the bandwidth of that many.
    """
    transport = nodes.intra_transport or gpu.link_transport
    shared = min(1.0, ROOT_PORTS / nodes.gpus) if transport == "pcie" else 1.0
    rate = nodes.intra_GBps or (gpu.link_gb or INTRA_GBPS) * shared
    latency = LATENCY_US[transport] if nodes.intra_latency_us is None else nodes.intra_latency_us
    return Wire(rate * 1e9, latency * 1e-6, transport)


def _closeness(name: str, nodes: Nodes) -> int:
    named: Sequence[str] = (ANY, nodes.zone, nodes.type)
    return max((rank for rank, each in enumerate(named) if each == name), default=-1)
