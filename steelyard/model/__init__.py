"""Models as plain single-device modules, one file per family. No process group and no mesh comes in here."""

from __future__ import annotations

from steelyard.core.recipe.model_section import GptModel, LlamaModel
from steelyard.model.gpt import Gpt
from steelyard.model.init_weights import initial, initialise
from steelyard.model.kv_cache import Cache
from steelyard.model.language_model import LanguageModel, Slice
from steelyard.model.llama import Llama

__all__ = ["Cache", "Gpt", "LanguageModel", "Llama", "Slice", "build", "initial", "initialise"]


def build(shape: GptModel | LlamaModel, part: Slice | None = None) -> LanguageModel:
    """The model of a recipe or a slice of it, its weights not yet set."""
    return Gpt(shape, part) if isinstance(shape, GptModel) else Llama(shape, part)
