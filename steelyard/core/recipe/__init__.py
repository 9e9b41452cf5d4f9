"""The recipe: one typed TOML file that says what to do.

There is one module per section; `load_recipe` turns files and overrides into a checked `Recipe`.
"""

from steelyard.core.recipe.loader import load_recipe, shipped
from steelyard.core.recipe.recipe import Recipe
from steelyard.core.recipe.toml import to_toml

__all__ = ["Recipe", "load_recipe", "shipped", "to_toml"]
