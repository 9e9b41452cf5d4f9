"""`[checkpoint]`: how often to save, how many to keep."""

from __future__ import annotations

from pydantic import Field

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section


class CheckpointSection(Section):
    """What is saved. A run saves at its end and when it is asked to stop, unless `at_end` is false."""

    every: NonNegativeInt = 1000
    keep_last: PositiveInt = 3
    keep_best: bool = Field(False, description="also save, and keep, the step with the lowest validation loss")
    at_end: bool = Field(True, description="false: what the run learned is not wanted, as in a trial of its speed")
    background: bool = Field(True, description="write while training goes on")
