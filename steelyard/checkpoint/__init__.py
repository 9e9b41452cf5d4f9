"""Saving and loading on torch.distributed.checkpoint. A checkpoint is a folder that exists whole or not at all."""

from steelyard.checkpoint.folder import STATE, Checkpoint, latest, load, save, source
from steelyard.checkpoint.pieces import Piece
from steelyard.checkpoint.saver import Saver

__all__ = ["STATE", "Checkpoint", "Piece", "Saver", "latest", "load", "save", "source"]
