"""`[train]`: length of the run, batch sizes, precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from steelyard.core.recipe.section import Batch, NonNegativeInt, PositiveInt, Section, Seed, contradiction


class BatchRamp(Section):
    """The global batch grows from `start` by `increment`, evenly over the first `samples` samples."""

    start: Batch
    increment: Batch
    samples: PositiveInt


class TrainSection(Section):
    """Length, batches and precision of a run."""

    steps: PositiveInt = Field(1000, description="optimizer steps; computed from samples or tokens if one is set")
    samples: PositiveInt | None = Field(None, description="length of the run in samples, instead of steps")
    tokens: PositiveInt | None = Field(None, description="length of the run in tokens, instead of steps")
    max_hours: PositiveFloat | None = Field(None, description="save a checkpoint and stop after this many hours")
    global_batch: Batch = 32
    micro_batch: Batch = 1
    batch_ramp: BatchRamp | None = Field(None, description="a growing global batch: start, increment and samples")
    seed: Seed = 1234
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = Field(
        "fp32", description="of matrix products; weights, accumulated gradients and optimizer state are fp32"
    )
    fp8_scaling: Literal["tensor", "row"] = Field(
        "tensor", description="fp8: a scale for each tensor, or for each row of both factors of a product"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool | None = Field(None, description="torch.compile for each layer; default: true on a GPU")
    tune_kernels: bool = Field(
        False, description="let the compiler search for faster launches of its kernels: a minute once, 1 to 2% per step"
    )
    cuda_graph: bool = Field(
        False, description="replay the passes as a CUDA graph, if a step waits for the host; one GPU, rows of one size"
    )
    loss_scale: PositiveFloat = Field(65536.0, description="fp16: the initial dynamic loss scale")
    loss_scale_window: PositiveInt = Field(1000, description="fp16: finite steps before the scale is doubled")
    nonfinite_limit: NonNegativeInt = Field(
        10, description="consecutive steps that may be skipped because the loss or gradient is not finite"
    )
    max_skipped_fraction: float = Field(
        0.1, ge=0, le=1, description="fraction of the last 100 steps that may be skipped; 1: no limit"
    )
    init_from: str | None = Field(None, description="a checkpoint or run with the initial weights")

    @field_validator("device", mode="before")
    @classmethod
    def _no_mps(cls, device: object) -> object:
        if device == "mps":
            raise contradiction(
                "train.device",
                "mps is not supported: losses and gradient norms are summed in float64, which Apple's GPUs lack",
                "use cpu, or auto, which selects the CPU on a Mac",
            )
        return device

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainSection:
        if self.global_batch % self.micro_batch:
            raise contradiction(
                "train.micro_batch",
                f"{self.micro_batch} does not divide train.global_batch = {self.global_batch}",
                f"choose a divisor of {self.global_batch}",
            )
        ramp = self.batch_ramp
        if ramp is not None and (ramp.start > self.global_batch or (self.global_batch - ramp.start) % ramp.increment):
            raise contradiction(
                "train.batch_ramp",
                f"from {ramp.start} in steps of {ramp.increment} the batch never reaches train.global_batch = "
                f"{self.global_batch}",
                "choose an increment that divides the difference",
            )
        if self.samples is not None and self.tokens is not None:
            raise contradiction(
                "train.tokens", "train.samples is also set", "choose one: the length is in steps, samples or tokens"
            )
        return self

    def batch_at(self, consumed: int) -> int:
        """The global batch of the step that begins after `consumed` samples."""
        ramp = self.batch_ramp
        if ramp is None or consumed >= ramp.samples or ramp.start == self.global_batch:
            return self.global_batch
        increments = (self.global_batch - ramp.start) // ramp.increment
        return ramp.start + ramp.increment * min(increments, consumed * increments // ramp.samples)

    def samples_in(self, steps: int) -> int:
        """Samples that the first `steps` steps consume."""
        consumed = 0
        for batch, number in self._ramp():
            taken = min(number, steps)
            consumed, steps = consumed + taken * batch, steps - taken
            if not steps:
                break
        return consumed + steps * self.global_batch

    def steps_for(self, samples: int) -> int:
        """Whole steps in `samples` samples, at least one."""
        consumed, steps = 0, 0
        for batch, number in self._ramp():
            taken = min(number, -(-(samples - consumed) // batch))
            consumed, steps = consumed + taken * batch, steps + taken
            if consumed >= samples:
                break
        return max(1, steps + max(0, samples - consumed) // self.global_batch)

    def _ramp(self) -> Iterator[tuple[int, int]]:
        """The batch sizes below the final one, in order, each with its number of steps."""
        ramp, consumed = self.batch_ramp, 0
        while ramp is not None and (batch := self.batch_at(consumed)) < self.global_batch:
            increments = (self.global_batch - ramp.start) // ramp.increment
            following = (batch - ramp.start) // ramp.increment + 1
            until = -(-following * ramp.samples // increments)  # Start of the next batch size.
            steps = -(-(until - consumed) // batch)
            yield batch, steps
            consumed += steps * batch
