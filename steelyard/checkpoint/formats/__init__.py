"""One interface to all checkpoint formats: open a checkpoint, load a model from it, convert it to another format.

source = open_source("models/Llama-3.1-8B")      # Hugging Face, GGUF, Megatron, Megatron-DeepSpeed or Steelyard
network = model.build(source.config)
load_into(source, network)
"""

from steelyard.checkpoint.formats.source import (
    CheckpointSource,
    SourceView,
    is_own,
    load_into,
    load_shards,
    open_source,
)

__all__ = ["CheckpointSource", "SourceView", "is_own", "load_into", "load_shards", "open_source"]
