"""Measured layers, read from a profile that `steelyard plan profile` wrote, in place of what the catalogue promises.

A profile is TOML: gpu (the catalogue's name, or the device's own), device, precision, family, hidden, heads, kv_heads,
ffn, sequence_length, date, versions, host, rates, and `[[layers]]` with tensor, micro_batch, forward and backward in
seconds. Where a layout's tensor degree and micro-batch were measured, its layers take the measured time; elsewhere the
reckoned time is scaled by the nearest measurement.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, ValidationError

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.loader import explained
from steelyard.core.recipe.section import PositiveInt, Section
from steelyard.core.recipe.toml import read
from steelyard.plan.cluster import Cluster


class MeasuredLayer(Section):
    """One layer's two passes."""

    tensor: PositiveInt
    micro_batch: PositiveInt
    forward: PositiveFloat
    backward: PositiveFloat


class Profile(Section):
    """The whole file."""

    gpu: str
    device: str
    precision: str
    hidden: PositiveInt
    family: str | None = None
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    ffn: PositiveInt | None = None
    sequence_length: PositiveInt
    date: str
    versions: dict[str, str]
    host: dict[str, str | int]
    rates: dict[str, float]
    layers: Annotated[list[MeasuredLayer], Field(min_length=1)]

    def nearest(self, tensor: int, micro_batch: int) -> MeasuredLayer:
        """The measurement that is most like this one."""
        return min(
            self.layers,
            key=lambda one: abs(math.log(one.tensor / tensor)) + abs(math.log(one.micro_batch / micro_batch)),
        )


def load(path: str | Path) -> Profile:
    """Read and check a profile."""
    values, places = read(path, "a profile")
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, str(path), Profile) from None


def refuse_another(profile: Profile, recipe: Recipe, path: str | Path, cluster: Cluster | None = None) -> None:
    """Refuse a profile of other layers than the recipe's, or of a GPU that the cluster has not."""
    names = sorted({gpu.name for gpu in cluster.gpu_by_type.values()}) if cluster else [profile.gpu]
    if profile.gpu not in names:
        raise UserError(
            f"this profile is of {profile.gpu}, and the cluster has {', '.join(names)}",
            where=str(path),
            hint="leave it out, or set its gpu to what the cluster file calls this device",
        )
    model = recipe.model
    mine: dict[str, object] = {
        "hidden": model.hidden,
        "sequence_length": recipe.data.sequence_length,
        "precision": recipe.train.precision,
    }
    reported = {
        "family": model.family,
        "heads": model.heads,
        "ffn": model.ffn,
        "kv_heads": getattr(model, "kv_heads", model.heads),
    }
    mine |= {
        key: value for key, value in reported.items() if getattr(profile, key) is not None
    }  # Older ones do not tell.
    for key, value in mine.items():
        if getattr(profile, key) != value:
            raise UserError(
                f"this profile has {key} {getattr(profile, key)}, and the recipe {value}",
                where=str(path),
                hint="measure again with steelyard plan profile --model RECIPE",
            )
