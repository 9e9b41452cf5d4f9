"""Saving and loading on torch.distributed.checkpoint. A checkpoint is a folder that exists whole or not at all."""

from steelyard.checkpoint.folder import Checkpoint, latest, load, save, source

__all__ = ["Checkpoint", "latest", "load", "save", "source"]
