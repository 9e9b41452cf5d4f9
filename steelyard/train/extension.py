"""What may be added to training without a second loop: masks, adapters, another loss."""

from __future__ import annotations

from torch import Tensor

from steelyard.model import LanguageModel
from steelyard.parallel.parts import Part


class Extension:
    """Training as it is. A subclass changes what it needs to."""

    def transform(self, model: LanguageModel) -> None:
        """Change a model, or a stage of it, before it is cut and sharded; it has no weights yet."""

    def loss(self, stage: LanguageModel) -> Tensor | None:
        """A loss that a stage adds to every micro-batch, in nats for the whole step, from its own weights."""
        return None

    def metrics(self) -> dict[str, float]:
        """What to add to each record."""
        return {}

    def saves(self, part: Part) -> bool:
        """Whether a checkpoint holds this parameter."""
        return True
