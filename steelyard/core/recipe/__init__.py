"""The recipe: one typed TOML file that describes a run.

There is one module per section; `load_recipe` builds a validated `Recipe` from files and overrides.
"""

from steelyard.core.recipe.load import load_recipe, shipped
from steelyard.core.recipe.recipe import Recipe
from steelyard.core.recipe.toml import to_toml

__all__ = ["Recipe", "load_recipe", "shipped", "to_toml"]
