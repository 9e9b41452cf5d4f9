"""Models as plain single-device modules, built from blocks. This package uses no process groups and no mesh."""

from __future__ import annotations

from steelyard.core.recipe.model_section import ModelConfig
from steelyard.model.batch import Batch
from steelyard.model.kv_cache import Cache, Slot
from steelyard.model.language_model import LanguageModel, StageSpec
from steelyard.model.weight_init import init_weights, initial

__all__ = ["Batch", "Cache", "LanguageModel", "Slot", "StageSpec", "build", "init_weights", "initial"]


def build(config: ModelConfig, stage_spec: StageSpec | None = None) -> LanguageModel:
    """Build the model of a recipe, or one stage of it. Its weights are not initialized."""
    return LanguageModel(config, stage_spec)
