"""The counters that a checkpoint holds beside tensors, and how the outcome of a step updates them.

The outcomes of steps are summed on the device. The host reads the sums for a record, for a checkpoint, and after each
step where that costs no synchronisation.

Skipped steps are limited twice: in a row (`train.nonfinite_limit`), and as a fraction of the last `WINDOW` steps
(`train.max_skipped_fraction`). A step that fp16's loss scale skips counts toward the fraction only at the smallest
scale: above it the scaler is still searching for a scale that works.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from steelyard.core.recipe import Recipe
from steelyard.training.lr_schedule import TrainProgress

WINDOW = 100
SMALLEST = 1.0  # loss scale


@dataclass
class Counters:
    """Counters of a run. `loss_sum` and `loss_tokens` count since the last record."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    skipped: int = 0
    """Steps that fp16's loss scale skipped."""
    nonfinite: int = 0
    """Other steps skipped because the loss or the gradient was not finite."""
    streak: int = 0
    """Steps skipped in a row, up to the last one."""
    schedule_steps: int = 0
    schedule_samples: int = 0
    recent_skips: list[int] = field(default_factory=list)
    """The skipped steps among the last `WINDOW`, if they count toward the fraction."""
    loss_scale: dict[str, float] = field(default_factory=dict)

    def progress_after(self, batch: int, sequence_length: int) -> TrainProgress:
        """Progress of the learning-rate schedule after one more step."""
        samples = self.schedule_samples + batch
        return TrainProgress(self.schedule_steps + 1, samples, samples * sequence_length)


@dataclass
class LossScale:
    """The factor on the loss, since small fp16 gradients underflow; 1 except for fp16.

    It is halved when a step overflows, and doubled after `window` good steps.
    """

    scale: float
    window: int
    good_steps: int = 0

    def after(self, overflowed: bool) -> None:
        """Update the scale after a step."""
        if overflowed:
            self.scale, self.good_steps = max(SMALLEST, self.scale / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps = self.scale * 2, 0


class TrainState:
    """Counts the steps of a run."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.train, self.length, self.device = recipe.train, recipe.data.sequence_length, device
        self.is_fp16 = recipe.train.precision == "fp16"
        self.counters = Counters()
        self.loss_scale = LossScale(recipe.train.loss_scale if self.is_fp16 else 1.0, recipe.train.loss_scale_window)
        self.norm = torch.zeros((), device=device)
        self._loss = torch.zeros((), device=device)
        # Summed loss, its number of predicted tokens, skipped steps, and steps skipped in a row.
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        # 1 if a step was skipped, by step modulo window.
        self._recent = torch.zeros(WINDOW, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, norm: Tensor, skipped: Tensor, batch: int, labels: int) -> None:
        """Add a step of `batch` samples and `labels` predicted tokens.

        With fp16 the host waits for the outcome, which the schedule and the loss scale depend on.
        """
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
        may_overflow = self.is_fp16 and self.loss_scale.scale > SMALLEST
        self._recent[counters.step % WINDOW] = 0.0 if may_overflow else skipped
        moved = not (self.is_fp16 and bool(skipped))
        if self.is_fp16:
            self.loss_scale.after(overflowed=not moved)
        if moved:
            counters.schedule_steps += 1
            counters.schedule_samples += batch

    @property
    def is_due(self) -> bool:
        """Whether to settle after this step: if that needs no synchronisation, and once per window."""
        return self.device.type == "cpu" or self.is_fp16 or self.counters.step % WINDOW == 0

    def settle(self) -> None:
        """Move the device's sums into the counters."""
        counters = self.counters
        loss_sum, tokens, skipped, streak, *recent = torch.cat([self._sums, self._recent]).tolist()
        self._sums[:3] = 0
        last = range(max(1, counters.step - WINDOW + 1), counters.step + 1)
        counters.recent_skips = [step for step in last if recent[step % WINDOW]]
        counters.loss_sum += loss_sum
        counters.loss_tokens += int(tokens)
        counters.streak = int(streak)
        if self.is_fp16:
            counters.skipped += int(skipped)
        else:
            counters.nonfinite += int(skipped)

    def exceeded(self) -> str | None:
        """Which limit on skipped steps was exceeded when the counters were last settled, if one was."""
        counters, fraction = self.counters, self.train.max_skipped_fraction
        if counters.streak > self.train.nonfinite_limit:
            loss, norm = self._loss.item(), self.norm.item()
            what = f"the gradient norm became {norm}" if math.isfinite(loss) else f"the loss became {loss}"
            return f"{what} by step {counters.step}, and the last {counters.streak} steps were skipped"
        skipped, allowed = len(counters.recent_skips), math.floor(fraction * WINDOW + 1e-9)
        if skipped > allowed:
            return (
                f"{skipped} of the last {min(counters.step, WINDOW)} steps were skipped by step {counters.step}: "
                f"train.max_skipped_fraction = {fraction:g} allows {allowed} of {WINDOW}"
            )
        return None

    def mean_loss(self) -> float | None:
        """The mean loss per token since the last call; None if every step was skipped."""
        counters = self.counters
        mean = counters.loss_sum / counters.loss_tokens if counters.loss_tokens else None
        counters.loss_sum, counters.loss_tokens = 0.0, 0
        return mean

    def state(self) -> dict[str, Any]:
        """The counters for a checkpoint."""
        self.settle()
        self.counters.loss_scale = {"scale": self.loss_scale.scale, "good_steps": self.loss_scale.good_steps}
        return asdict(self.counters)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the counters of a checkpoint."""
        known = {field.name for field in fields(Counters)}
        self.counters = Counters(**{key: value for key, value in state.items() if key in known})
        self._sums[3] = self.counters.streak
        for step in self.counters.recent_skips:
            self._recent[step % WINDOW] = 1
        if self.is_fp16:
            saved = self.counters.loss_scale
            self.loss_scale.scale, self.loss_scale.good_steps = saved["scale"], int(saved["good_steps"])
