"""`[train]`: how long, how much at once, in which precision."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from steelyard.core.recipe.section import Section, contradiction


class Train(Section):
    """The course of the run."""

    steps: PositiveInt = 1000
    global_batch: PositiveInt = 32
    micro_batch: PositiveInt = 1
    seed: NonNegativeInt = 1234
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Train:
        if self.global_batch % self.micro_batch:
            raise contradiction(
                "train.micro_batch",
                f"micro-batches of {self.micro_batch} do not fill train.global_batch = {self.global_batch}",
                f"choose a divisor of {self.global_batch}",
            )
        return self
