"""`[log]`: how often to log a step, and where."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

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

    @field_validator("on_verdict", mode="before")
    @classmethod
    def _has_target(cls, target: Any) -> Any:
        is_command = isinstance(target, list) and target and all(isinstance(word, str) for word in target)
        is_webhook = isinstance(target, str) and target.startswith(("http://", "https://", "$"))
        if target is not None and not is_command and not is_webhook:
            hint = 'write the words of a command, ["./notify.sh", "me"], the URL of a webhook, or $NAME of a variable'
            raise contradiction("log.on_verdict", f"{target!r} is neither a command nor a webhook", hint)
        return target

    @model_validator(mode="after")
    def _first_before_last(self) -> LogSection:
        for name in ("timeline", "profile"):
            steps = getattr(self, name)
            if steps is not None and steps[0] > steps[1]:
                raise contradiction(f"log.{name}", f"{steps[0]} is after {steps[1]}", "write [first, last]")
        return self
