"""Seconds of layers, embedding and head on the GPUs of a pipeline rank: compute, and communication inside the rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.optimizers import OPTIMIZERS
from steelyard.planning import communication, compute, update_cost
from steelyard.planning.cluster import Cluster, Nodes
from steelyard.planning.communication import AllToAll, Ring, group
from steelyard.planning.compute import Pass, Work
from steelyard.planning.cost_table import StageCost, UnitCost
from steelyard.planning.evidence import OWN
from steelyard.planning.layer_dims import LayerDims
from steelyard.planning.layout import Layout, Seat
from steelyard.planning.software import Software
from steelyard.planning.update_cost import UpdateCost
from steelyard.sizes.activations import working_bytes
from steelyard.sizes.gpu_catalogue import Gpu

if TYPE_CHECKING:
    from steelyard.planning.measured_layers import Profile


class StageCosts:
    """The costs of one recipe and one program; `profiles` by GPU, `imbalance` as in `Predictor`."""

    def __init__(
        self, recipe: Recipe, cluster: Cluster, software: Software, profiles: Mapping[str, Profile], imbalance: float
    ) -> None:
        self.recipe, self.cluster, self.software = recipe, cluster, software
        self.profiles, self.imbalance = profiles, imbalance
        self.dims, self.each, self.evidence = LayerDims.of(recipe), working_bytes(recipe), cluster.evidence
        self._known: dict[tuple[object, ...], StageCost] = {}

    def of(self, layout: Layout, seats: Sequence[Seat]) -> StageCost:
        """The cost on the slowest GPU among the seats."""
        kinds = {seat.nodes.type: seat.nodes for seat in seats}.values()
        tensor = group(self.cluster, seats, 1, layout.tensor)
        context = group(self.cluster, seats, layout.tensor, layout.context)
        expert = communication.all_to_all(self.cluster, seats, layout.tensor, layout.expert)
        each = [self._cost_on(layout, nodes, tensor, context, expert) for nodes in kinds]
        cost = max(each, key=lambda cost: sum(cost.passes(1)))
        optim = self.recipe.optim
        return replace(cost, update=_host_updates(kinds, OPTIMIZERS[optim.name].states)) if optim.offload else cost

    def gpu_of(self, nodes: Nodes) -> Gpu:
        """The GPU of a node, with measured rates where a profile has them."""
        gpu = self.cluster.gpu_of(nodes)
        profile = self.profiles.get(gpu.name)
        return gpu if profile is None else profile.calibrated(gpu, self.recipe.train.precision)

    def _cost_on(self, layout: Layout, nodes: Nodes, tensor: Ring, context: Ring, expert: AllToAll) -> StageCost:
        gpu = self.gpu_of(nodes)
        how = (layout.micro_batch, layout.sequence_parallel, layout.recompute)
        key = (gpu.name, nodes.host_slowness, tensor, context, expert, how)
        if key not in self._known:
            software = self.software.on_host(nodes.host_slowness)
            self._known[key] = self._new_cost(layout, gpu, software, tensor, context, expert)
        return self._known[key]

    def _new_cost(
        self, layout: Layout, gpu: Gpu, software: Software, tensor: Ring, context: Ring, expert: AllToAll
    ) -> StageCost:
        cut = (layout.tensor, layout.context, layout.sequence_parallel)
        work = Work.of(self.recipe, gpu, software, layout.micro_batch, cut)
        work = replace(work, expert=layout.expert, imbalance=self.imbalance)
        tokens = layout.micro_batch * self.dims.sequence // layout.context
        stream = self.each * tokens * self.dims.hidden
        # Sequence parallelism replaces an all-reduce by a reduce-scatter and an all-gather: same bytes, two launches.
        sum_ = 2 * tensor.gather(stream) if layout.sequence_parallel else tensor.all_reduce(stream)
        sum_ *= software.exposed_exchange
        keys = 2 * self.each * tokens * layout.context * self.dims.key / layout.tensor
        gathered = context.gather(keys)
        launch = software.collective_launch * (layout.tensor > 1) * (2 if layout.sequence_parallel else 1)
        routed, layers = self._slot_exchange(tokens, expert)
        launch_experts = 2 * software.collective_launch * layers
        layer, full = self._layer(work), layout.recompute == "full"
        # Outputs of the experts are needed again for the gradients of their weights, and of the router.
        routed_again = 0.0 if layout.recompute == "none" else routed
        sums_again = (1 if software.stops_early else 2) * sum_ + gathered if full else 0.0
        if software.regathers and layout.sequence_parallel:
            sums_again += 2 * tensor.gather(stream)
        if software.per_op and layout.recompute == "selective" and layout.sequence_parallel:
            sums_again += 2 * software.exposed_exchange * tensor.gather(stream)
        ahead = layer.forward + 2 * sum_ + gathered + routed + software.routing_wait * layers
        back = layer.backward + 2 * sum_ + 2 * gathered + sums_again + _again(layer, layout.recompute)
        back += routed + routed_again
        exchanges = 2 * launch + launch_experts
        host = layer.host_forward + exchanges
        cost = StageCost(
            UnitCost(
                forward=ahead,
                backward=back,
                host_forward=host,
                host_backward=layer.host_backward + exchanges + (host if full else 0.0),
                exchange=4 * sum_ + 3 * gathered + sums_again,
                weights=layer.forward,  # One of the three matrix products of each linear map; the rest is small.
                expert=2 * routed + routed_again,
            ),
            _end_cost(compute.embedding(work, self.dims), sum_ / 2, 0.0, launch),
            _end_cost(compute.head(work, self.dims), 0.0, sum_, launch),
            (update_cost.optimizer(work, self.recipe),),
        )
        return self.evidence.corrected(cost, layout, gpu.name)

    def _slot_exchange(self, tokens: int, expert: AllToAll) -> tuple[float, float]:
        """Seconds of the all-to-alls of one pass of a layer, to the experts and back, and the share of such layers.

        The busiest rank receives more slots than the others.
        """
        experts = self.dims.experts
        if experts is None or expert.ranks == 1:
            return 0.0, 0.0
        slots = self.each * tokens * experts.top_k * self.dims.hidden * self.imbalance
        return 2 * expert.seconds(slots) * experts.layers_share, experts.layers_share

    def _layer(self, work: Work) -> Pass:
        """The passes of a layer, scaled by the nearest measurement where a profile of the GPU exists.

        Profiles time Steelyard's layers, so they do not scale those of other programs.
        """
        layer = compute.layer(work, self.dims)
        profile = self.profiles.get(work.gpu.name) if self.software.name == OWN else None
        return layer if profile is None else profile.scaled(layer, work, self.dims)


def _host_updates(kinds: Iterable[Nodes], states: int) -> tuple[UpdateCost, ...]:
    """The optimizer update in host memory, on each type of node."""
    return tuple(update_cost.host_optimizer(nodes, nodes.gpus, states) for nodes in kinds)


def _again(layer: Pass, recompute: str | int) -> float:
    return layer.recompute if recompute == "full" else layer.selective if recompute == "selective" else 0.0


def _end_cost(cost: Pass, exchange_forward: float, exchange_backward: float, launch: float) -> UnitCost:
    return UnitCost(
        cost.forward + exchange_forward,
        cost.backward + exchange_backward,
        cost.host_forward + launch,
        cost.host_backward + launch,
        exchange_forward + exchange_backward,
        0.0,
    )
