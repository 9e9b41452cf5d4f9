"""`[eval]`: validation during training."""

from __future__ import annotations

from pydantic import Field

from steelyard.core.recipe.section import NonNegativeInt, Section


class EvalSection(Section):
    """How often to compute the validation loss. 0: only at the first and the last step."""

    every: NonNegativeInt = 1000
    batches: NonNegativeInt = Field(
        0, description="global batches per validation; default: 10, or fewer if they hold more than 256 samples"
    )
    patience: NonNegativeInt = Field(0, description="stop after this many validations without improvement; 0: never")
