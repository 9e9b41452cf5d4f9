"""Predict steps whose pipeline stages have different tensor and data degrees, for `measured_steps.py`.

Some of Sailor's measured runs are of this form. `steelyard train` uses one mesh for all stages and cannot run them, so
the planner does not search for them. In each round of a step, a stage takes a chunk of the global batch and splits it
among its data ranks: a stage of d data ranks has micro-batches of chunk / d samples. Between stages of different
degrees every rank receives its own samples, and its own part of the sequence under sequence parallelism. The ranks that
hold these share the sends evenly. With equal degrees the time is that of the uniform layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steelyard.core.recipe import Recipe
from steelyard.planning.cluster import Cluster
from steelyard.planning.communication import group, reached
from steelyard.planning.layout import Layout, Seat, Seats
from steelyard.planning.predict import Predictor
from steelyard.planning.step import StepCost


@dataclass(frozen=True)
class Width:
    """The degrees of one stage, and the micro-batch of one of its data ranks."""

    tensor: int
    data: int
    micro_batch: int


@dataclass(frozen=True)
class StagedLayout:
    """A layout with a `Width` for each stage; tensor, data and micro_batch of `base` are not used."""

    base: Layout
    widths: tuple[Width, ...]

    def at(self, stage: int, recipe: Recipe) -> Layout:
        """The uniform layout with the degrees of one stage."""
        width = self.widths[stage]
        parallel = width.tensor > 1 and recipe.data.sequence_length % width.tensor == 0
        return replace(
            self.base, tensor=width.tensor, data=width.data, micro_batch=width.micro_batch, sequence_parallel=parallel
        )


def staged_step(predictor: Predictor, staged: StagedLayout) -> StepCost:
    """The cost of a step of such a layout as a function of its partition."""
    layouts = [staged.at(stage, predictor.recipe) for stage in range(len(staged.widths))]
    seats = _seats(predictor.cluster, staged)
    pairs = list(zip(layouts, seats, strict=True))
    send = [_send(predictor, pairs[stage], pairs[stage + 1]) for stage in range(len(pairs) - 1)]
    table = predictor.table(
        layouts[0],
        tuple(predictor.stage_costs.of(*pair) for pair in pairs),
        tuple(group(predictor.cluster, here, layout.tensor, layout.data) for layout, here in pairs),
        tuple(send),
        tuple(range(len(pairs))),
    )
    params = [predictor.rank_params(layout.tensor, layout.pipeline)[rank] for rank, layout in enumerate(layouts)]
    shards = [layout.data * layout.context if layout.zero else 1 for layout in layouts]
    return StepCost(replace(table, params=tuple(params), shards=tuple(shards)))


def _seats(cluster: Cluster, staged: StagedLayout) -> list[tuple[Seat, ...]]:
    """The seats of each stage, in rank order."""
    seats, first, found = Seats(cluster, staged.base.placement), 0, []
    for width in staged.widths:
        found.append(seats.of(first, width.tensor * width.data))
        first += width.tensor * width.data
    return found


Stage = tuple[Layout, tuple[Seat, ...]]


def _send(predictor: Predictor, one: Stage, other: Stage) -> float:
    if one[0] == other[0]:
        return predictor.send(one[0], one[1], other[1])
    return max(_resharded(predictor, one, other), _resharded(predictor, other, one))


def _resharded(predictor: Predictor, sender: Stage, receiver: Stage) -> float:
    """Seconds to send the activations of a chunk, or their gradients, to a stage of other degrees."""
    one, other = sender[0], receiver[0]
    dims, scattered = predictor.dims, predictor.software.scattered
    cuts = [layout.tensor if layout.sequence_parallel or scattered else 1 for layout in (one, other)]
    received = predictor.each * other.micro_batch * dims.sequence * dims.hidden / cuts[1]
    sent = received * (other.tensor * other.data) / (one.tensor * one.data)
    # A rank receives from every data rank that holds its samples, and every part of them.
    arriving = -(-one.data // other.data) * -(-cuts[0] // cuts[1])
    leaving = -(-arriving * other.tensor * other.data // (one.tensor * one.data))
    messages = max(arriving, leaving)
    return max(_exchange(predictor.cluster, a, b, sent, received, messages) for a in sender[1] for b in receiver[1])


def _exchange(cluster: Cluster, one: Seat, other: Seat, sent: float, received: float, messages: int) -> float:
    """Seconds in which each rank of one seat sends `sent` bytes and each rank of the other receives `received` bytes.

    Between nodes the busier of the two network cards counts. Each message adds one latency.
    """
    if one.node == other.node:
        wire = cluster.inside(one.nodes)
        return messages * wire.latency + max(sent, received) / reached(wire)
    wire = cluster.wire(one.nodes, other.nodes)
    return messages * wire.latency + max(sent * one.ranks, received * other.ranks) / reached(wire)
