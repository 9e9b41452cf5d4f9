"""Training: `run` is the only training loop; pre-training, fine-tuning and sparsity extend it."""

from steelyard.training.trainer import run

__all__ = ["run"]
