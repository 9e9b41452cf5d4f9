"""How long ranks take to send to each other: a bandwidth, a latency, and who shares a wire.

Collectives go around a ring, as NCCL's large ones do: an all-reduce sends 2 (n - 1) / n of its bytes over every link,
an all-gather or reduce-scatter half of that. A ring over several nodes crosses the network once per node; where a
node's GPUs belong to several rings, these share its network cards. The shares and latencies below are the only free
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.plan.cluster import Cluster, Wire
from steelyard.plan.layout import Seat

LINK_SHARE = 0.67  # of a link's bandwidth that collectives inside a node reach
NETWORK_SHARE = 0.87  # of a network card's, where GPUs reach it directly
SOCKET_SHARE = 0.45  # of a network card's, where all goes through the host's sockets
SOCKET_LATENCY = 10e-6  # A network as slow to answer as this has no way around the host.
BASE_LATENCY = 2e-6  # of any collective, however few its ranks


@dataclass(frozen=True)
class Ring:
    """One group of ranks: how many, the slowest link among them, and what a hop costs."""

    ranks: int
    bandwidth: float
    latency: float

    def all_reduce(self, bytes_: float) -> float:
        """Seconds to sum a tensor over all ranks."""
        return 2 * self.gather(bytes_) - (BASE_LATENCY if self.ranks > 1 else 0.0)

    def gather(self, bytes_: float) -> float:
        """Seconds of an all-gather to, or a reduce-scatter of, so many bytes."""
        if self.ranks == 1:
            return 0.0
        hops = self.ranks - 1
        return BASE_LATENCY + hops / self.ranks * bytes_ / self.bandwidth + hops * self.latency


def ring(cluster: Cluster, seats: Sequence[Seat], ranks: int, rings: int) -> Ring:
    """A ring of `ranks` over the seats, beside which the same nodes serve `rings` - 1 others."""
    inside = [cluster.inside(seat.nodes) for seat in seats]
    slowest = min(wire.bandwidth for wire in inside) * LINK_SHARE
    latency = max(wire.latency for wire in inside)
    if len(seats) == 1:
        return Ring(ranks, slowest, latency)
    across = _across(cluster, seats)
    shared = _reached(across) / rings
    # Of the ring's hops only one per node leaves it.
    share = min(1.0, len(seats) / ranks)
    return Ring(ranks, min(slowest, shared), share * across.latency + (1 - share) * latency)


def _across(cluster: Cluster, seats: Sequence[Seat]) -> Wire:
    """The slowest network that a ring over these seats crosses."""
    kinds = list({seat.nodes.type: seat.nodes for seat in seats}.values())
    wires = [cluster.wire(one, other) for one in kinds for other in kinds]
    return Wire(min(wire.bandwidth for wire in wires), max(wire.latency for wire in wires))


def send(cluster: Cluster, one: Seat, other: Seat, bytes_: float, senders: int) -> float:
    """Seconds to send from a rank of one seat to a rank of the other, `senders` of the node sending at once."""
    if one.node == other.node:
        wire = cluster.inside(one.nodes)
        return wire.latency + bytes_ / (wire.bandwidth * LINK_SHARE)
    wire = cluster.wire(one.nodes, other.nodes)
    return wire.latency + bytes_ * senders / _reached(wire)


def exchange(cluster: Cluster, one: Seat, other: Seat, sent: float, received: float, messages: int) -> float:
    """Seconds in which each rank of one seat sends so many bytes and each of the other receives so many, all at once.

    Between nodes the fuller of the two network cards counts; each of a rank's messages waits for a latency of its own.
    """
    if one.node == other.node:
        wire = cluster.inside(one.nodes)
        return messages * wire.latency + max(sent, received) / (wire.bandwidth * LINK_SHARE)
    wire = cluster.wire(one.nodes, other.nodes)
    return messages * wire.latency + max(sent * one.ranks, received * other.ranks) / _reached(wire)


def _reached(wire: Wire) -> float:
    """Bytes per second of a network that large messages reach."""
    return wire.bandwidth * (NETWORK_SHARE if wire.latency < SOCKET_LATENCY else SOCKET_SHARE)


def group(cluster: Cluster, seats: Sequence[Seat], stride: int, size: int) -> Ring:
    """The slowest ring of `size` ranks, `stride` apart, among the ranks of a stage."""
    if size == 1:
        return Ring(1, 1.0, 0.0)
    span = stride * size
    fitting = [seat for seat in seats if seat.ranks >= span]
    if len(fitting) == len(seats):  # Every ring lies within a node.
        slowest = min(fitting, key=lambda seat: cluster.inside(seat.nodes).bandwidth)
        return ring(cluster, [slowest], size, 1)
    # A ring spans nodes: those of a node are as many as it has ranks, or as there are rings.
    rings = max(min(stride, seat.ranks) for seat in seats)
    return ring(cluster, _spanned(seats, span), size, rings)


def _spanned(seats: Sequence[Seat], span: int) -> Sequence[Seat]:
    """Seats that one ring reaches: all of a stage's for data parallelism, a window of them for smaller groups."""
    total = sum(seat.ranks for seat in seats)
    if span >= total:
        return seats
    count = max(2, -(-span * len(seats) // total))
    kinds = {seat.nodes.type: seat for seat in seats}
    return [*kinds.values(), *seats][: max(count, len(kinds))]
