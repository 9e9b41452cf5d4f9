"""Training: `run` is the one loop that everything else extends."""

from steelyard.training.trainer import run

__all__ = ["run"]
