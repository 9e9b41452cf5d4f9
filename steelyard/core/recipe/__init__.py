"""The recipe: one typed TOML file that says what to do.

There is one module per section; `load` turns files and overrides into a checked `Recipe`.
"""

from steelyard.core.recipe.load import load, shipped
from steelyard.core.recipe.recipe import Recipe
from steelyard.core.recipe.toml import to_toml

__all__ = ["Recipe", "load", "shipped", "to_toml"]
