"""Models as plain single-device modules, one file per family. No process group and no mesh comes in here."""

from __future__ import annotations

from torch import nn

from steelyard.core.recipe.model import GptModel, LlamaModel
from steelyard.model.gpt import Gpt
from steelyard.model.initialise import initialise
from steelyard.model.llama import Llama

__all__ = ["Gpt", "Llama", "build", "initialise"]


def build(shape: GptModel | LlamaModel) -> nn.Module:
    """The model of a recipe, its weights not yet set: token ids (batch, length) to logits (batch, length, vocab)."""
    return Gpt(shape) if isinstance(shape, GptModel) else Llama(shape)
