"""`[eval]`: validation while training."""

from __future__ import annotations

from pydantic import Field

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section


class EvalSection(Section):
    """How often to measure the loss on the validation share of the data. 0 leaves only the first and the last step."""

    every: NonNegativeInt = 1000
    batches: PositiveInt = 10
    patience: NonNegativeInt = Field(0, description="end after so many validations without a better one; 0: never")
