"""`[checkpoint]`: how often to save, how many to keep."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from steelyard.core.recipe.section import Section


class Checkpoint(Section):
    """What is saved. A run saves at its end, unless `last` is false, and always when it is asked to stop."""

    every: NonNegativeInt = 1000
    keep_last: PositiveInt = 3
    keep_best: bool = Field(False, description="also save, and keep, the step with the lowest validation loss")
    last: bool = Field(True, description="save the last step; a run that is only measured need not")
    background: bool = Field(True, description="write while training goes on")
