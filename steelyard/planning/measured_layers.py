"""Layer times and rates that `steelyard plan profile` measured, used instead of computed ones.

A profile is a TOML file: gpu (the name in the catalogue, or the device name), device, precision, family, hidden, heads,
kv_heads, ffn, sequence_length, date, versions, host, rates, and `[[layers]]` with tensor, micro_batch, and seconds of
forward and backward. A layout whose tensor degree and micro-batch were measured gets the measured time. Other layouts
get the computed time, scaled by the nearest measurement.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, ValidationError

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.load import explained
from steelyard.core.recipe.section import PositiveInt, Section
from steelyard.core.recipe.toml import read
from steelyard.planning import communication, compute, weight_copies
from steelyard.planning.cluster import Cluster, Nodes
from steelyard.planning.compute import Pass, Work
from steelyard.planning.layer_dims import LayerDims
from steelyard.sizes.gpu_catalogue import Gpu
from steelyard.sizes.param_count import expert_keys


class MeasuredLayer(Section):
    """Seconds of the two passes of one layer."""

    tensor: PositiveInt
    micro_batch: PositiveInt
    forward: PositiveFloat
    backward: PositiveFloat


class Profile(Section):
    """A profile file."""

    gpu: str
    device: str
    precision: str
    hidden: PositiveInt
    family: str | None = None
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    ffn: PositiveInt | None = None
    experts: PositiveInt | None = None
    experts_per_token: PositiveInt | None = None
    expert_ffn: PositiveInt | None = None
    shared_ffn: PositiveInt | None = None
    sequence_length: PositiveInt
    date: str
    versions: dict[str, str]
    host: dict[str, str | int]
    rates: dict[str, float]
    left_out: Annotated[list[str], Field(default_factory=list)]
    """What was not measured for lack of time."""
    layers: Annotated[list[MeasuredLayer], Field(min_length=1)]

    def nearest(self, tensor: int, micro_batch: int) -> MeasuredLayer:
        """The measurement nearest to this tensor degree and micro-batch."""
        return min(
            self.layers,
            key=lambda one: abs(math.log(one.tensor / tensor)) + abs(math.log(one.micro_batch / micro_batch)),
        )

    def scaled(self, layer: Pass, work: Work, dims: LayerDims) -> Pass:
        """The computed passes of a layer, scaled by measured / computed time of the nearest measurement."""
        found = self.nearest(work.tensor, work.micro_batch)
        same = replace(
            work, tensor=found.tensor, micro_batch=found.micro_batch, context=1, sequence_parallel=False, expert=1
        )
        known, copies, weights = (
            compute.layer(same, dims),
            weight_copies.alone(same, dims.experts is not None),
            dims.weights / same.tensor,
        )
        ahead = found.forward / compute.together(known.host_forward, known.forward + weights * copies.forward)
        back = found.backward / compute.together(known.host_backward, known.backward + weights * copies.backward)
        return Pass(
            forward=layer.forward * ahead,
            backward=layer.backward * back,
            host_forward=layer.host_forward * ahead,
            host_backward=layer.host_backward * back,
            recompute=layer.recompute * ahead,
            selective=layer.selective * ahead,
        )

    def calibrated(self, gpu: Gpu, precision: str) -> Gpu:
        """The GPU with the measured rates of large matrix products and copies."""
        peak = gpu.peak(precision)
        if peak is None:
            return gpu
        products, copies = self.rates.get("product_tflops"), self.rates.get("copy_gbps")
        return replace(
            gpu,
            sustained=products * 1e12 / peak if products else gpu.sustained,
            bandwidth_gb=copies / compute.MEMORY_SHARE if copies else gpu.bandwidth_gb,
        )

    def with_link(self, nodes: Nodes, gpu: Gpu) -> Nodes:
        """The nodes with the measured link between their GPUs, unless the cluster file gives `intra_GBps`."""
        measured = self.rates.get("link_gbps")
        if not measured or nodes.intra_GBps is not None:
            return nodes
        latency = nodes.intra_latency_us if nodes.intra_latency_us is not None else self.rates.get("link_latency_us")
        share = communication.REACHED[nodes.intra_transport or gpu.link_transport]
        return nodes.model_copy(update={"intra_GBps": measured / share, "intra_latency_us": latency})


def load(path: str | Path) -> Profile:
    """Read and validate a profile."""
    values, places = read(path, "a profile")
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, str(path), Profile) from None


def refuse_another(profile: Profile, recipe: Recipe, path: str | Path, cluster: Cluster | None = None) -> None:
    """Raise `UserError` if the layers of the profile differ from the recipe's, or its GPU is not in the cluster."""
    names = sorted({gpu.name for gpu in cluster.gpu_by_type.values()}) if cluster else [profile.gpu]
    if profile.gpu not in names:
        raise UserError(
            f"this profile was measured on {profile.gpu}, but the cluster has {', '.join(names)}",
            where=str(path),
            hint="omit it, or set gpu in the profile to the name of this device in the cluster file",
        )
    model = recipe.model
    mine: dict[str, object] = {
        "hidden": model.hidden,
        "sequence_length": recipe.data.sequence_length,
        "precision": recipe.train.precision,
    }
    # Older profiles do not have these keys.
    optional = {
        "family": model.family,
        "heads": model.heads,
        "ffn": model.ffn,
        "kv_heads": getattr(model, "kv_heads", model.heads),
    }
    mine |= {key: value for key, value in optional.items() if getattr(profile, key) is not None}
    mine |= expert_keys(model)
    for key, value in mine.items():
        if getattr(profile, key) != value:
            raise UserError(
                f"this profile has {key} {getattr(profile, key)}, but the recipe has {value}",
                where=str(path),
                hint="measure again with steelyard plan profile --model RECIPE",
            )
