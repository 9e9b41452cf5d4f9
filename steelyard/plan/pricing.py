"""What nodes cost and draw, and what a second of theirs counts for an objective."""

from __future__ import annotations

from steelyard.plan.cluster import Cluster
from steelyard.plan.layout import Placement


def price_hour(cluster: Cluster, placement: Placement) -> float | None:
    """What the nodes cost in an hour; None where the price of one is not known."""
    prices = [(cluster.nodes_of(type_).price_hour, number) for type_, number in placement]
    if any(price is None for price, _ in prices):
        return None
    return sum((price or 0.0) * number for price, number in prices)


def watts(cluster: Cluster, placement: Placement) -> float | None:
    """Power of the nodes at work; None where that of a GPU is not known."""
    total = 0.0
    for type_, number in placement:
        nodes = cluster.nodes_of(type_)
        each = cluster.gpu_of(nodes).watts
        if each is None:
            return None
        total += number * (nodes.idle_watts + nodes.gpus * each)
    return total


def weight(objective: str, price_hour: float | None, watts_: float | None) -> float:
    """What a second of a step counts for an objective: 1 for time, dollars for cost, joules for energy."""
    if objective == "cost":
        return (price_hour or 0.0) / 3600
    return (watts_ or 0.0) if objective == "energy" else 1.0
