"""Measured layers, read from a profile that `steelyard plan profile` wrote, in place of what the catalogue promises.

A profile is TOML: gpu (the catalogue's name, or the device's own), device, precision, hidden, sequence_length, date,
versions, host, rates, and `[[layers]]` with tensor, micro_batch, forward and backward in seconds. Where a layout's
tensor degree and micro-batch were measured, its layers take the measured time; elsewhere the reckoned time is scaled by
the nearest measurement.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.load import explained
from steelyard.core.recipe.section import Section
from steelyard.core.recipe.toml import parse


class Measured(Section):
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
    sequence_length: PositiveInt
    date: str
    versions: dict[str, str]
    host: dict[str, str | int]
    rates: dict[str, float]
    layers: Annotated[list[Measured], Field(min_length=1)]

    def nearest(self, tensor: int, micro_batch: int) -> Measured:
        """The measurement that is most like this one."""
        return min(
            self.layers,
            key=lambda one: abs(math.log(one.tensor / tensor)) + abs(math.log(one.micro_batch / micro_batch)),
        )


def load(path: str | Path) -> Profile:
    """Read and check a profile."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    values, places = parse(text, str(path))
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, str(path), Profile) from None


def refuse_another(profile: Profile, recipe: Recipe, path: str | Path) -> None:
    """Refuse a profile of other layers than the recipe's."""
    mine = {"hidden": recipe.model.hidden, "sequence_length": recipe.data.sequence_length,
            "precision": recipe.train.precision}  # fmt: skip
    for key, value in mine.items():
        if getattr(profile, key) != value:
            raise UserError(
                f"this profile has {key} {getattr(profile, key)}, and the recipe {value}",
                where=str(path),
                mend="measure again with steelyard plan profile --model RECIPE",
            )
