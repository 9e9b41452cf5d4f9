"""What a run must remember beside its tensors, and how a step's outcome gets there.

The outcome of a step is added up on the device; the host asks for it when it needs a number: for a record, for a
checkpoint, or after each step where asking costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from steelyard.core.errors import Fault
from steelyard.core.recipe import Recipe
from steelyard.train.scaling import LossScale
from steelyard.train.schedule import Progress


@dataclass
class Counters:
    """Numbers of a run. `loss_sum` and `loss_tokens` reach back to the last record."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    skipped: int = 0
    """Steps that fp16's loss scale skipped."""
    nonfinite: int = 0
    """Other steps skipped because loss or gradient was not finite."""
    streak: int = 0
    """Steps skipped in a row, up to now."""
    schedule_steps: int = 0
    schedule_samples: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)

    def progress_after(self, batch: int, sequence_length: int) -> Progress:
        """Where the learning rate's schedule is after one more step."""
        samples = self.schedule_samples + batch
        return Progress(self.schedule_steps + 1, samples, samples * sequence_length)


class Tally:
    """Counts the steps of a run."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.train, self.length, self.device = recipe.train, recipe.data.sequence_length, device
        self.is_fp16 = recipe.train.precision == "fp16"
        self.counters = Counters()
        self.loss_scale = LossScale(recipe.train.loss_scale if self.is_fp16 else 1.0, recipe.train.loss_scale_window)
        self.norm = torch.zeros((), device=device)
        self._loss = torch.zeros((), device=device)
        # Summed loss, predictions it is of, steps skipped, and steps skipped in a row.
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, norm: Tensor, skipped: Tensor, batch: int, labels: int) -> None:
        """Add a step of so many samples and predictions. With fp16 the schedule and the scale wait for its outcome."""
        counters = self.counters
        counters.step += 1
        counters.samples += batch
        counters.tokens += batch * self.length
        counts = torch.isfinite(loss)
        self._sums[0] += torch.where(counts, loss, 0.0)
        self._sums[1] += counts * labels
        self._sums[2] += skipped
        self._sums[3] = (self._sums[3] + 1) * skipped
        self._loss, self.norm = loss, norm
        moved = not (self.is_fp16 and bool(skipped))
        if self.is_fp16:
            self.loss_scale.after(overflowed=not moved)
        if moved:
            counters.schedule_steps += 1
            counters.schedule_samples += batch
        if self.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Bring the device's sums into the counters, and end a run that has only been skipping steps."""
        counters = self.counters
        loss_sum, tokens, skipped, streak = self._sums.tolist()
        self._sums[:3] = 0
        counters.loss_sum += loss_sum
        counters.loss_tokens += int(tokens)
        counters.streak = int(streak)
        if self.is_fp16:
            counters.skipped += int(skipped)
        else:
            counters.nonfinite += int(skipped)
        if counters.streak > self.train.nonfinite_limit:
            loss, norm = self._loss.item(), self.norm.item()
            what = f"the gradient norm became {norm}" if math.isfinite(loss) else f"the loss became {loss}"
            raise Fault(
                f"{what} by step {counters.step}, the last {counters.streak} of which were skipped",
                mend="lower optim.learning_rate",
            )

    def mean_loss(self) -> float | None:
        """The mean loss of a token since this was last asked; none where every step was skipped."""
        counters = self.counters
        mean = counters.loss_sum / counters.loss_tokens if counters.loss_tokens else None
        counters.loss_sum, counters.loss_tokens = 0.0, 0
        return mean

    def state(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        self.settle()
        self.counters.loss_scale = {"scale": self.loss_scale.scale, "good_steps": self.loss_scale.good_steps}
        return asdict(self.counters)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds."""
        known = {field.name for field in fields(Counters)}
        self.counters = Counters(**{key: value for key, value in state.items() if key in known})
        self._sums[3] = self.counters.streak
        if self.is_fp16:
            saved = self.counters.loss_scale
            self.loss_scale.scale, self.loss_scale.good_steps = saved["scale"], int(saved["good_steps"])
