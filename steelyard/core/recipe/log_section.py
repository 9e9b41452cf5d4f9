"""`[log]`: how often to log a step, and where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section, contradiction

Steps = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]


class LogSection(Section):
    """Logging and profiling. metrics.jsonl is always written."""

    every: PositiveInt = 10
    report: bool = Field(True, description="write report.html when the run ends")
    tensorboard: bool = False
    wandb: str | None = Field(None, description="Weights & Biases project; WANDB_MODE=offline uploads nothing")
    timeline: Steps | None = Field(None, description="first and last step of the timeline of all ranks: [10, 12]")
    profile: Steps | None = Field(None, description="first and last step inside cudaProfilerApi and NVTX ranges")
    profile_tool: Literal["torch", "memory", "nsys", "ncu"] | None = Field(
        None, description="profiler of these steps; default: one that was started around the command"
    )
    profile_ranks: list[NonNegativeInt] = Field([], description="ranks to profile; empty: all ranks")

    on_verdict: str | list[str] | None = Field(
        None, description="command (its words) or webhook (URL, or $NAME of a variable) for changes of watch's verdict"
    )

    @model_validator(mode="after")
    def _has_target(self) -> LogSection:
        target = self.on_verdict
        if target == [] or (isinstance(target, str) and not target.startswith(("http://", "https://", "$"))):
            hint = 'write the words of a command, ["./notify.sh", "me"], the URL of a webhook, or $NAME of a variable'
            raise contradiction("log.on_verdict", f"{target!r} is neither a command nor a webhook", hint)
        return self

    @model_validator(mode="after")
    def _first_before_last(self) -> LogSection:
        for name in ("timeline", "profile"):
            steps = getattr(self, name)
            if steps is not None and steps[0] > steps[1]:
                raise contradiction(f"log.{name}", f"{steps[0]} is after {steps[1]}", "write [first, last]")
        return self
