"""`[log]`: how often a step is written down, and where else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section, contradiction

Steps = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]


class LogSection(Section):
    """metrics.jsonl is always written."""

    every: PositiveInt = 10
    report: bool = Field(True, description="write report.html when the run ends")
    tensorboard: bool = False
    wandb: str | None = Field(None, description="Weights & Biases project; WANDB_MODE=offline keeps it on this machine")
    timeline: Steps | None = Field(None, description="first and last step whose parts every rank times: [10, 12]")
    profile: Steps | None = Field(None, description="first and last step inside cudaProfilerApi and NVTX ranges")
    profile_tool: Literal["torch", "memory", "nsys", "ncu"] | None = Field(
        None, description="what looks at these steps; left out: a profiler that was started around the command"
    )
    profile_ranks: list[NonNegativeInt] = Field([], description="whose steps are looked at; none named: all ranks'")

    @model_validator(mode="after")
    def _first_before_last(self) -> LogSection:
        for name in ("timeline", "profile"):
            steps = getattr(self, name)
            if steps is not None and steps[0] > steps[1]:
                raise contradiction(f"log.{name}", f"{steps[0]} comes after {steps[1]}", "write [first, last]")
        return self
