"""Dynamic loss scaling for fp16, where small gradients underflow: the largest scale that does not overflow."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 1.0


@dataclass
class LossScale:
    """The factor on the loss: halved when a step overflows, doubled after `window` good steps. 1 except for fp16."""

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
