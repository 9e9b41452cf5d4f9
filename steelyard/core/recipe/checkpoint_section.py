"""`[checkpoint]`: how often to save, and how many checkpoints to keep."""

from __future__ import annotations

from pydantic import Field, model_validator

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section, contradiction


class CheckpointSection(Section):
    """When to save. A run also saves at its end and on a stop signal, unless `at_end` is false."""

    every: NonNegativeInt = 1000
    keep_last: PositiveInt = 3
    keep_best: bool = Field(False, description="also save and keep the step with the lowest validation loss")
    at_end: bool = Field(True, description="false: do not save at the end, for example in a speed test")
    background: bool = Field(True, description="write while training continues")
    memory_every: NonNegativeInt = Field(
        0, description="steps between copies in host memory, also on another node; 0 makes none"
    )
    memory_device_gib: float = Field(
        0.0, ge=0, le=10_000, description="device memory that holds a part of the state until it is copied"
    )
    memory_dir: str = Field("/dev/shm", min_length=1, description="a tmpfs for these copies, on every node")

    @model_validator(mode="after")
    def _memory_is_more_frequent(self) -> CheckpointSection:
        if 0 < self.every <= self.memory_every:
            raise contradiction(
                "checkpoint.memory_every",
                f"{self.memory_every} would never be used: checkpoint.every is {self.every}, and these go to disk",
                f"set it below {self.every}, or increase checkpoint.every",
            )
        if not self.memory_dir.startswith("/"):
            raise contradiction(
                "checkpoint.memory_dir",
                f"{self.memory_dir} is not an absolute path",
                "give a tmpfs that every node has, such as /dev/shm",
            )
        return self
