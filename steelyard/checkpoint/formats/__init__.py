"""Checkpoints of every kind behind one face: open one, fill a model from it, write it as another.

source = open_source("models/Llama-3.1-8B")      # Hugging Face, GGUF, Megatron, Megatron-DeepSpeed or Steelyard
network = model.build(source.config)
load_into(source, network)
"""

from steelyard.checkpoint.formats.source import CheckpointSource, is_own, load_into, load_pieces, open_source

__all__ = ["CheckpointSource", "is_own", "load_into", "load_pieces", "open_source"]
