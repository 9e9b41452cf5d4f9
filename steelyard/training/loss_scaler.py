"""Loss scaling for fp16, whose smallest gradients would vanish: as large as overflow allows, found by trying."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 1.0


@dataclass
class LossScale:
    """The factor on the loss: halved when a step overflows, doubled after `window` good ones. 1 but for fp16."""

    scale: float
    window: int
    good_steps: int = 0

    def after(self, overflowed: bool) -> None:
        """Learn from a step."""
        if overflowed:
            self.scale, self.good_steps = max(SMALLEST, self.scale / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps = self.scale * 2, 0
