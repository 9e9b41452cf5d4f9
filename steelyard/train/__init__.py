"""Training: `run` is the one loop that everything else extends."""

from steelyard.train.trainer import run

__all__ = ["run"]
