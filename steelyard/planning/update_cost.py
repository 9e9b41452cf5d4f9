"""The time of the optimizer update, from the state and the FLOPs that `core/recipe/optimizers.py` declares.

An update is bound by memory bandwidth, except for products of whole matrices (Muon). The ranks of a pipeline rank share
these products.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.optimizers import GRADIENT_BYTES, OPTIMIZERS, STATE_BYTES
from steelyard.planning.cluster import Nodes
from steelyard.planning.compute import Work
from steelyard.planning.software import Software
from steelyard.sizes.activations import FP32
from steelyard.sizes.param_count import parameters

ADAM_STATES = 2  # of the optimizer in `Software.optimizer_bytes`
EXCHANGED = {"bf16": 2, "fp32": 4}  # bytes of an element of a matrix, to its owner or back


@dataclass(frozen=True)
class UpdateCost:
    """The optimizer update, as bytes per parameter and the bandwidths that move them."""

    bytes: float
    bandwidth: float
    sharers: int = 1
    """Ranks that share the bandwidth."""
    link_bytes: float = 0.0
    """Bytes per parameter between GPU and host, before and after the update."""
    link_bandwidth: float = 1.0
    layer: float = 0.0
    """Seconds for the products of whole matrices of a layer, which the ranks of a pipeline rank share."""

    def seconds(self, parameters: float, layers: float = 0.0) -> float:
        """Seconds to update `parameters` parameters, with the whole matrices of `layers` layers."""
        moved = self.link_bytes * parameters / self.link_bandwidth + self.layer * layers
        return moved + self.bytes * parameters * self.sharers / self.bandwidth


def optimizer(work: Work, recipe: Recipe) -> UpdateCost:
    """The update on the GPU."""
    optim, sizes = recipe.optim, parameters(recipe.model)
    spec = OPTIMIZERS[optim.name]
    states = spec.states + (spec.matrix_states - spec.states) * sizes.matrices / sizes.total
    bytes_ = work.software.optimizer_bytes - 2 * (FP32 * ADAM_STATES - STATE_BYTES[optim.state] * states)
    bytes_ -= FP32 - GRADIENT_BYTES[optim.gradients]
    bytes_ += work.software.fp16_bytes if work.precision == "fp16" else 0.0
    peak = work.gpu.peak(optim.muon_precision)
    rate = work.rate if peak is None else peak * work.gpu.sustained
    return UpdateCost(bytes_, work.bandwidth, layer=matrix_flops(recipe) / rate)


def reduced_bytes(software: Software, recipe: Recipe) -> int:
    """Bytes of a gradient that ranks reduce."""
    if recipe.optim.gradients == "bf16":
        return GRADIENT_BYTES["bf16"]
    return software.gradient_bytes or (2 if recipe.train.precision == "fp16" else 4)


def matrix_flops(recipe: Recipe) -> float:
    """FLOPs of the optimizer to update the matrices of a layer, on average over layers."""
    flops, optim, layers = OPTIMIZERS[recipe.optim.name].matrix_flops, recipe.optim, recipe.model.blocks.layers
    numbers = Counter(map(id, layers))  # Equal layers are one object.
    total = 0.0
    for layer in {id(layer): layer for layer in layers}.values():
        for shape in (param.shape for param in layer.params().values() if param.is_matrix):
            count = shape[0] if len(shape) == 3 else 1
            total += numbers[id(layer)] * count * flops(shape[-2], shape[-1], optim.muon_ns_steps)
    return total / len(layers)


def exchanged_bytes(recipe: Recipe, tensor: int) -> int:
    """Bytes of a layer's matrices on a tensor rank, if the optimizer exchanges them between ranks."""
    if not matrix_flops(recipe):
        return 0
    return EXCHANGED[recipe.optim.muon_precision] * parameters(recipe.model, tensor).matrices // recipe.model.layers


def host_optimizer(nodes: Nodes, ranks: int, states: int) -> UpdateCost:
    """The update in host memory (`optim.offload`).

    Gradients move to the host and weights move back, both in fp32, one after the other. In between, all `ranks` of a
    node read and write weights and states and read gradients at the same time.
    """
    return UpdateCost(
        bytes=FP32 * (2 * (1 + states) + 1),
        bandwidth=nodes.host_GBps * 1e9,
        sharers=ranks,
        link_bytes=2 * FP32,
        link_bandwidth=nodes.host_link_GBps * 1e9,
    )
