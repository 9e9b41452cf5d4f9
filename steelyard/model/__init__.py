"""Models as plain single-device modules, one file per family. This package uses no process groups and no mesh."""

from __future__ import annotations

from steelyard.core.recipe.model_section import GptConfig, LlamaConfig
from steelyard.model.batch import Batch
from steelyard.model.gpt import Gpt
from steelyard.model.kv_cache import Cache
from steelyard.model.language_model import LanguageModel, StageSpec
from steelyard.model.llama import Llama
from steelyard.model.weight_init import init_weights, initial

__all__ = ["Batch", "Cache", "Gpt", "LanguageModel", "Llama", "StageSpec", "build", "init_weights", "initial"]


def build(config: GptConfig | LlamaConfig, part: StageSpec | None = None) -> LanguageModel:
    """Build the model of a recipe, or one stage of it. Its weights are not initialized."""
    return Gpt(config, part) if isinstance(config, GptConfig) else Llama(config, part)
