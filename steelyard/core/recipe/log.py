"""`[log]`: how often a step is written down, and where else."""

from __future__ import annotations

from pydantic import PositiveInt

from steelyard.core.recipe.section import Section


class Log(Section):
    """metrics.jsonl is always written."""

    every: PositiveInt = 10
    tensorboard: bool = False
