"""Steelyard: text and GPUs in, a trained and published language model out.

The names in `__all__` are the public API (docs/api.md). Each is imported when it is first used, so that
`import steelyard` loads neither torch nor anything else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steelyard.api import (
        LoadedModel,
        OpenedRun,
        build_model,
        convert,
        finetune,
        load_model,
        open_run,
        plan,
        prune,
        train,
    )
    from steelyard.core.recipe import load_recipe
    from steelyard.text.tokenizer import load_tokenizer
    from steelyard.training.extension import Extension

__version__ = "0.1.0"

__all__ = [
    "Extension",
    "LoadedModel",
    "OpenedRun",
    "build_model",
    "convert",
    "finetune",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "open_run",
    "plan",
    "prune",
    "train",
]

_ELSEWHERE = {
    "Extension": "steelyard.training.extension",
    "load_recipe": "steelyard.core.recipe",
    "load_tokenizer": "steelyard.text.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "steelyard.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
