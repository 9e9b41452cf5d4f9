"""Training: `run` is the one loop that everything else extends."""

from steelyard.train.loop import run

__all__ = ["run"]
