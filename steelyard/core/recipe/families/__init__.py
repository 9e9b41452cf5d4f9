"""Model families. A family is one file: its config class with the blocks it consists of, and its names in Hugging Face.

Every class in a module of this package with a literal `family` is one. Other packages add families by the entry point
group `steelyard.families`, whose values name modules.
"""

from __future__ import annotations

import pkgutil
from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from operator import or_
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field

from steelyard.core.recipe.model_section import ModelConfig

ENTRY_POINTS = "steelyard.families"


def _modules() -> list[ModuleType]:
    found = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return found + [each.load() for each in entry_points(group=ENTRY_POINTS)]


def _families() -> dict[str, type[ModelConfig]]:
    found: dict[str, type[ModelConfig]] = {}
    for module in _modules():
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, ModelConfig):
                for name in get_args(each.model_fields["family"].annotation):
                    found[name] = each
    return found


FAMILIES = _families()
"""Config classes by the name of their family."""

if TYPE_CHECKING:
    Model = ModelConfig
else:
    Model: Any = Annotated[reduce(or_, dict.fromkeys(FAMILIES.values())), Field(discriminator="family")]


def of_architecture(name: str | None) -> type[ModelConfig] | None:
    """The family of a class of `transformers`."""
    return next((each for each in FAMILIES.values() if name in each.architectures), None)


def of_gguf(name: str | None) -> type[ModelConfig] | None:
    """The family of an architecture of llama.cpp."""
    return next((each for each in FAMILIES.values() if name in each.gguf_architectures), None)


def gguf_architectures() -> list[str]:
    """All supported architectures of llama.cpp."""
    return sorted({name for each in FAMILIES.values() for name in each.gguf_architectures})


def architectures() -> list[str]:
    """All supported classes of `transformers`."""
    return sorted({name for each in FAMILIES.values() for name in each.architectures})
