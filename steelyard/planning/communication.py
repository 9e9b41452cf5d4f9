"""The time of sends and collectives, from bandwidth, latency and the number of groups that share a link.

Collectives use a ring, as NCCL does for large messages: an all-reduce sends 2 (n - 1) / n of its bytes over every link,
an all-gather or reduce-scatter half of that. A ring over several nodes crosses the network once per node. Rings that
pass through the same node share its network cards. The constants below are the only fitted numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steelyard.planning.cluster import Cluster, Wire
from steelyard.planning.layout import Seat

# Share of a link's bandwidth that large messages reach. Sockets copy through the hosts' memory and kernels.
REACHED = {"nvlink": 0.75, "pcie": 0.785, "rdma": 0.943, "tcp": 0.345}
BASE_LATENCY = 9.2e-6  # of every collective
FREE = 1e14  # Bytes per second from which a link costs nothing: `measured_ranks` predicts compute alone.


@dataclass(frozen=True)
class Ring:
    """A group of ranks: its size, the bandwidth of its slowest link, and the latency of a hop."""

    ranks: int
    bandwidth: float
    latency: float

    def all_reduce(self, bytes_: float) -> float:
        """Seconds of an all-reduce of `bytes_` bytes."""
        return max(0.0, 2 * self.gather(bytes_) - (BASE_LATENCY if self.ranks > 1 else 0.0))

    def gather(self, bytes_: float) -> float:
        """Seconds of an all-gather to, or a reduce-scatter of, `bytes_` bytes."""
        if self.ranks == 1 or self.bandwidth >= FREE:
            return 0.0
        hops = self.ranks - 1
        return BASE_LATENCY + hops / self.ranks * bytes_ / self.bandwidth + hops * self.latency


def ring(cluster: Cluster, seats: Sequence[Seat], ranks: int, rings: int) -> Ring:
    """A ring of `ranks` ranks over the seats. `rings` rings in total share the network of the same nodes."""
    inside = [cluster.inside(seat.nodes) for seat in seats]
    slowest = min(map(reached, inside))
    latency = max(wire.latency for wire in inside)
    if len(seats) == 1:
        return Ring(ranks, slowest, latency)
    across = _across(cluster, seats)
    shared = reached(across) / rings
    if across.transport == "rdma" and rings > 1 and ranks > len(seats):
        # Each ring enters and leaves the node at one of its GPUs, and groups that are unaware of each other choose the
        # same network cards: of one card per GPU, or fewer, they use as many as there are rings.
        shared *= min(1.0, rings / max(seat.nodes.gpus for seat in seats))
    # Only one hop per node crosses the network.
    share = min(1.0, len(seats) / ranks)
    return Ring(ranks, min(slowest, shared), share * across.latency + (1 - share) * latency)


def _across(cluster: Cluster, seats: Sequence[Seat]) -> Wire:
    """The slowest network between any two of the seats."""
    kinds = list({seat.nodes.type: seat.nodes for seat in seats}.values())
    wires = [cluster.wire(one, other) for one in kinds for other in kinds]
    slowest = min(wires, key=reached)
    return replace(slowest, latency=max(wire.latency for wire in wires))


def send(cluster: Cluster, one: Seat, other: Seat, bytes_: float, senders: int) -> float:
    """Seconds to send from a rank of one seat to a rank of the other while `senders` ranks of the node send."""
    if one.node == other.node:
        wire = cluster.inside(one.nodes)
        return wire.latency + bytes_ / reached(wire)
    wire = cluster.wire(one.nodes, other.nodes)
    return wire.latency + bytes_ * senders / reached(wire)


def reached(wire: Wire) -> float:
    """Bytes per second that large messages reach on a link."""
    return wire.bandwidth * REACHED[wire.transport] / wire.slower


def group(cluster: Cluster, seats: Sequence[Seat], stride: int, size: int) -> Ring:
    """The slowest ring of `size` ranks with a stride of `stride` ranks, among the ranks of a stage."""
    if size == 1:
        return Ring(1, 1.0, 0.0)
    span = stride * size
    fitting = [seat for seat in seats if seat.ranks >= span]
    if len(fitting) == len(seats):  # Every ring stays inside a node.
        slowest = min(fitting, key=lambda seat: reached(cluster.inside(seat.nodes)))
        return ring(cluster, [slowest], size, 1)
    # Rings span nodes. The rings that pass through a node are at most its ranks, and at most the stride.
    rings = max(min(stride, seat.ranks) for seat in seats)
    return ring(cluster, _spanned(seats, span), size, rings)


@dataclass(frozen=True)
class AllToAll:
    """A group of ranks that send different bytes to each other: seconds per byte that a rank sends, and latency."""

    ranks: int
    per_byte: float
    latency: float

    def seconds(self, bytes_: float) -> float:
        """Seconds of an all-to-all of which each rank holds `bytes_` bytes before and after."""
        return 0.0 if self.ranks == 1 else BASE_LATENCY + self.latency + bytes_ * self.per_byte


def all_to_all(cluster: Cluster, seats: Sequence[Seat], stride: int, size: int) -> AllToAll:
    """The slowest all-to-all of `size` ranks with a stride of `stride` ranks, among the ranks of a stage.

    A rank keeps 1 / size of its bytes. What goes to ranks of its own node takes the link, the rest takes the network,
    which all ranks of the node share. Both run at the same time.
    """
    if size == 1:
        return AllToAll(1, 0.0, 0.0)
    inside = [cluster.inside(seat.nodes) for seat in seats]
    link = min(map(reached, inside))
    latency = max(wire.latency for wire in inside)
    if all(seat.ranks >= stride * size for seat in seats):
        return AllToAll(size, (size - 1) / size / link, latency)
    across = _across(cluster, seats)
    fewest, most = min(seat.ranks for seat in seats), max(seat.ranks for seat in seats)
    near = max(1, min(size, fewest // stride))
    on_network = (size - near) / size * most / reached(across)
    return AllToAll(size, max(on_network, (near - 1) / size / link), across.latency)


def _spanned(seats: Sequence[Seat], span: int) -> Sequence[Seat]:
    """Seats that one ring uses: all seats of a stage for data parallelism, a window of them for smaller groups."""
    total = sum(seat.ranks for seat in seats)
    if span >= total:
        return seats
    count = max(2, -(-span * len(seats) // total))
    kinds = {seat.nodes.type: seat for seat in seats}
    return [*kinds.values(), *seats][: max(count, len(kinds))]
