"""The time of one training step, computed from a table of plain numbers.

`predict.py` fills a `CostTable` with everything that does not depend on the partition: seconds of a layer, the
embedding and the head on each pipeline rank, parameter counts, ring costs and send times. `StepCost` combines the table
with the number of layers per stage, so that a search over partitions evaluates the same table many times.
`pipeline_sim` gives the end of each rank's last backward pass. Gradient reduction and the optimizer update follow and
are added per rank, because ranks that finish early wait for late ones anyway.
"""

from __future__ import annotations

from typing import NamedTuple

from steelyard.planning import pipeline_sim
from steelyard.planning.communication import Ring
from steelyard.planning.cost_table import NO_COPIES, CostTable, Parts
from steelyard.planning.pipeline_sim import CriticalPath, Times


class Simulated(NamedTuple):
    """A simulated step."""

    seconds: float
    last: int
    """The pipeline rank that ends last."""
    finish: list[float]
    """When each action finishes; empty if the step was extrapolated."""


class StepCost:
    """The time of a step as a function of the layers per stage."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.plan = (table.schedule, table.pipeline, table.virtual, table.micro_batches)
        self.splits = table.schedule == "zero-bubble" and table.pipeline * table.virtual > 1
        free = (0.0,) * len(table.send)
        self.send = free if table.waits_to_send else table.send
        self.receive = table.send if table.waits_to_send and table.waits_to_receive else ()
        # A search asks for these thousands of times: passes by stage and by kind of rank, and what follows them.
        self._stages: list[dict[int, tuple[float, float, float]]] = [{} for _ in range(table.pipeline * table.virtual)]
        self._kinds: dict[tuple[int, int, int], tuple[float, float, float]] = {}
        self._after: dict[tuple[int, int, int], tuple[float, float]] = {}

    def times(self, counts: tuple[int, ...]) -> Times:
        """Seconds of each stage's passes and of the sends between stages."""
        forward, backward, weights = zip(*self.passes(counts), strict=True)
        return Times(forward, backward, weights, self.send, self.receive)

    def passes(self, counts: tuple[int, ...]) -> list[tuple[float, float, float]]:
        """Seconds of each stage's forward and backward pass, and of the weight gradients if these are split off."""
        known, found = self._stages, []
        for stage, layers in enumerate(counts):
            passes = known[stage].get(layers)
            if passes is None:
                passes = known[stage][layers] = self._stage(stage, layers)
            found.append(passes)
        return found

    def _stage(self, stage: int, layers: int) -> tuple[float, float, float]:
        table, end = self.table, (stage == 0) + 2 * (stage == len(self._stages) - 1)
        forward, backward, weights = self._without_waits(stage % table.pipeline, layers, end)
        if not table.waits_to_send:
            return forward, backward, weights
        ahead, behind = self._waits(stage)
        return forward + ahead, backward + behind, weights

    def _without_waits(self, rank: int, layers: int, end: int) -> tuple[float, float, float]:
        """The same without waits, computed once for each kind of rank; `end` as in `StageCost.passes`."""
        key = (self.table.kinds[rank], layers, end)
        if key not in self._kinds:
            forward, backward = self._with_copies(rank, layers, end)
            weights = layers * self.table.stages[rank].layer.weights if self.splits else 0.0
            self._kinds[key] = forward, backward - weights, weights
        return self._kinds[key]

    def _with_copies(self, rank: int, layers: int, end: int = 0) -> tuple[float, float]:
        """Seconds of the passes of a rank's stage; `end` as in `StageCost.passes`."""
        table = self.table
        if not table.copies:
            return table.stages[rank].passes(layers, end)
        copies = table.params[rank].copies(table.copies[rank], layers, end > 0)
        return table.stages[rank].passes(layers, end, copies)

    def _waits(self, stage: int) -> tuple[float, float]:
        """Seconds of a stage's forward and backward pass during which its rank is blocked by a send."""
        table = self.table
        if not table.waits_to_send:
            return 0.0, 0.0
        next_ = table.send[stage] if stage < len(table.send) else 0.0
        return next_, table.send[stage - 1] if stage else 0.0

    def per_layer(self) -> tuple[list[float], list[float]]:
        """Seconds per micro-batch on each pipeline rank: of one layer, and of the embedding and head without layers."""
        last, kinds = self.table.pipeline - 1, self.table.kinds
        by_kind = {kind: sum(self._with_copies(kinds.index(kind), 1)) for kind in set(kinds)}
        extra = [0.0] * len(kinds)
        for rank in {0, last}:
            extra[rank] = sum(self._with_copies(rank, 0, (rank == 0) + 2 * (rank == last)))
        return [by_kind[kind] for kind in kinds], extra

    def held(self, counts: tuple[int, ...], rank: int) -> int:
        """Parameters on a rank: the layers of its stages, the embedding and the head."""
        return sum(self._held(rank, sum(counts[rank :: self.table.pipeline])))

    def _held(self, rank: int, layers: int) -> tuple[int, int]:
        """Parameters on a rank that are not divided by expert parallelism, and those that are."""
        params = self.table.params[rank]
        return params.layer * layers + params.ends, params.experts * layers

    def after(self, counts: tuple[int, ...], times: Times, rank: int) -> tuple[float, float]:
        """Seconds of a pipeline rank after its last backward pass: gradient reduction, and the optimizer update."""
        layers, pipeline = sum(counts[rank :: self.table.pipeline]), self.table.pipeline
        gradient, update = self.after_layers(rank, layers)
        if self.table.overlaps_gradients and pipeline == 1:
            gradient = self._exposed(times, self._held(rank, layers))
        return gradient, update

    def after_layers(self, rank: int, layers: int) -> tuple[float, float]:
        """The same for a rank with this many layers, without overlap."""
        key = (self.table.kinds[rank], layers, rank if rank in (0, self.table.pipeline - 1) else -1)
        if key not in self._after:
            self._after[key] = self._gradient(rank, held := self._held(rank, layers)), self._update(rank, layers, held)
        return self._after[key]

    def _update(self, rank: int, layers: int, held: tuple[int, int]) -> float:
        """Seconds of the optimizer update."""
        table = self.table
        parameters = held[0] / table.shards[rank] + held[1] / table.expert_shards
        slowest = max(update.seconds(parameters, layers / table.stage_ranks) for update in table.stages[rank].update)
        # Shards of matrices go to their owners and results back; ranks that hold all only gather the results.
        ways = 1 if table.shards[rank] == 1 else 2 / table.shards[rank]
        bytes_ = table.matrix_bytes * layers
        return slowest + (ways * table.rings[rank].gather(bytes_) if bytes_ else 0.0)

    def _gradient(self, rank: int, held: tuple[int, int]) -> float:
        """Seconds to reduce a rank's gradients over its data-parallel group, and to all-gather sharded weights."""
        table = self.table
        if table.zero == 0:
            rings = self._rings_of(rank, held)
            return sum(ring.all_reduce(table.gradient_bytes * each) for ring, each in rings)
        gathered = 0.0 if table.zero == 3 and table.pipeline == 1 else self._gathered(rank, held, table.weight_bytes)
        return self._scattered(rank, held) + gathered

    def _scattered(self, rank: int, held: tuple[int, int]) -> float:
        """Seconds to reduce-scatter a rank's gradients."""
        return self._gathered(rank, held, self.table.gradient_bytes)

    def _gathered(self, rank: int, held: tuple[int, int], bytes_: int) -> float:
        """Seconds to all-gather, or reduce-scatter, a rank's parameters at `bytes_` bytes each."""
        return sum(ring.gather(bytes_ * each) for ring, each in self._rings_of(rank, held))

    def _rings_of(self, rank: int, held: tuple[int, int]) -> list[tuple[Ring, int]]:
        """The groups that share parameters of a rank, and the number of these parameters."""
        both = zip((self.table.rings[rank], *self.table.expert_rings[rank : rank + 1]), held, strict=False)
        return [(ring, each) for ring, each in both if each or ring is self.table.rings[rank]]

    def _exposed(self, times: Times, held: tuple[int, int]) -> float:
        """Gradient reduction and weight gathers that do not overlap with compute: at least the share of one layer.

        ZeRO 2 reduces after every micro-batch and gathers the weights once per step. ZeRO 3 gathers each layer twice
        per micro-batch.
        """
        table, micro_batches = self.table, self.table.micro_batches
        seconds, hidden = self._gradient(0, held), times.backward[0]
        if table.zero >= 2:
            seconds, hidden = seconds + (micro_batches - 1) * self._scattered(0, held), hidden * micro_batches
        if table.zero == 3:
            seconds += 2 * micro_batches * self._gathered(0, held, table.weight_bytes)
            hidden += times.forward[0] * micro_batches
        layers = max(1, table.layers)
        return max(seconds - hidden * (layers - 1) / layers, seconds / layers)

    def seconds(self, counts: tuple[int, ...], settled: bool = False) -> float:
        """The time of the step. `settled` extrapolates a long step from its first rounds, for use in a search."""
        times = self.times(counts)
        simulated = pipeline_sim.settled if settled else pipeline_sim.simulated_ends
        ends = simulated(times, *self.plan)
        after = (sum(self.after(counts, times, rank)) for rank in range(len(ends)))
        return max(end + more for end, more in zip(ends, after, strict=True)) + self.table.overhead

    def simulated(self, counts: tuple[int, ...]) -> Simulated:
        """The time of the step as a search needs it: `seconds`, settled."""
        if pipeline_sim.is_extrapolated(*self.plan):
            return Simulated(self.seconds(counts, settled=True), 0, [])
        times, actions = self.times(counts), pipeline_sim.order(*self.plan)
        finish = pipeline_sim.finished(times, actions)
        ends = [finish[number] + sum(self.after(counts, times, rank)) for rank, number in enumerate(actions.last)]
        slowest = max(ends)
        return Simulated(slowest + self.table.overhead, ends.index(slowest), finish)

    def critical_path(self, counts: tuple[int, ...], simulated: Simulated) -> CriticalPath | None:
        """The critical path of a simulated step; None if it was extrapolated."""
        if not simulated.finish:
            return None
        actions = pipeline_sim.order(*self.plan)
        return pipeline_sim.critical_path(self.times(counts), actions, simulated.finish, simulated.last)

    def at_least(self, counts: tuple[int, ...]) -> float:
        """A lower bound for the step that needs no simulation."""
        table, passes = self.table, self.passes(counts)
        bound = pipeline_sim.at_least(passes, self.send, self.receive, table.pipeline, table.micro_batches)
        return bound + table.overhead

    def host_share(self) -> float:
        """By how much the layers of the slowest rank take longer if its host takes longer, relative to each other."""
        table = self.table
        rank = max(range(table.pipeline), key=lambda rank: sum(self._with_copies(rank, 1)))
        copies = table.params[rank].copies(table.copies[rank], 1, False) if table.copies else NO_COPIES
        return table.stages[rank].host_share(copies)

    def parts(self, counts: tuple[int, ...]) -> Parts:
        """The step by part, on the rank that finishes last."""
        table, times = self.table, self.times(counts)
        timetable = pipeline_sim.simulate(times, *self.plan)
        ranks = range(table.pipeline)
        after = [self.after(counts, times, rank) for rank in ranks]
        slowest = max(ranks, key=lambda rank: timetable.ends[rank] + sum(after[rank]))
        busy = timetable.busy[slowest]
        layers = sum(counts[slowest :: table.pipeline])
        layer = table.stages[slowest].layer
        tensor = min(busy, table.micro_batches * layers * layer.exchange)
        expert = min(busy - tensor, table.micro_batches * layers * layer.expert)
        free_sends = times._replace(send=(0.0,) * len(times.send))
        bubble = pipeline_sim.simulate(free_sends, *self.plan).ends[slowest] - busy
        waits = sum(sum(self._waits(stage)) for stage in range(slowest, len(counts), table.pipeline))
        waits *= 2 if table.waits_to_receive else 1  # What a rank sends to its neighbours, it receives from them.
        return Parts(
            compute=busy - tensor - expert - table.micro_batches * waits,
            bubble=max(0.0, bubble),
            tensor=tensor,
            pipeline=max(0.0, timetable.ends[slowest] - busy - bubble) + table.micro_batches * waits,
            gradient=after[slowest][0],
            optimizer=after[slowest][1],
            overhead=table.overhead,
            expert=expert,
        )
