"""What a run must remember beside its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

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

    def state(self) -> dict[str, Any]:
        """As a checkpoint holds them."""
        return asdict(self)

    def progress_after(self, batch: int, sequence_length: int) -> Progress:
        """Where the learning rate's schedule is after one more step."""
        samples = self.schedule_samples + batch
        return Progress(self.schedule_steps + 1, samples, samples * sequence_length)
