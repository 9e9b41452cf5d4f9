"""`model.rope_scaling`: how RoPE frequencies change for contexts longer than the original."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from steelyard.core.recipe.section import Section

# No model is larger. The product of any two sizes fits in 64 bits.
Stretch = Annotated[float, Field(gt=0, le=10**6)]
Rows = Annotated[int, Field(gt=0, le=10**8)]


class RopeScaling(Section):
    """Keys of all kinds; `linear` uses only `factor`."""

    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    factor: Stretch = 8.0
    low_freq_factor: Stretch = Field(1.0, description="llama3: wavelengths that turn less often are divided by factor")
    high_freq_factor: Stretch = Field(4.0, description="llama3: wavelengths that turn more often are kept")
    original_positions: Rows = 8192
    beta_fast: Stretch = Field(32.0, description="yarn: dimensions that turn more often are kept")
    beta_slow: Stretch = Field(1.0, description="yarn: dimensions that turn less often are divided by factor")
    attention_factor: Stretch | None = Field(
        None, description="yarn: factor of cosine and sine; by default 0.1 ln(factor) + 1"
    )
    truncate: bool = Field(True, description="yarn: the limits are whole dimensions")
