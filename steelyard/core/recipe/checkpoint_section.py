"""`[checkpoint]`: how often to save, and how many checkpoints to keep."""

from __future__ import annotations

from pydantic import Field

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section


class CheckpointSection(Section):
    """When to save. A run also saves at its end and on a stop signal, unless `at_end` is false."""

    every: NonNegativeInt = 1000
    keep_last: PositiveInt = 3
    keep_best: bool = Field(False, description="also save and keep the step with the lowest validation loss")
    at_end: bool = Field(True, description="false: do not save at the end, for example in a speed test")
    background: bool = Field(True, description="write while training continues")
