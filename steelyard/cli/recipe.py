"""`steelyard recipe`: check, show and list recipes."""

from __future__ import annotations

import typer

from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, print_result
from steelyard.core import units
from steelyard.core.recipe import load, shipped, to_toml
from steelyard.sizes.model import parameters


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    group = typer.Typer(help=help_, rich_markup_mode=None, no_args_is_help=True)
    group.command("check")(check)
    group.command("show")(show)
    group.command("list")(list_)
    root.add_typer(group, name=name)


def check(recipe: RecipeArgument, overrides: Overrides = None, json: JsonOption = False) -> None:
    """Say whether a recipe is sound.

    Example: steelyard recipe check my.toml train.steps=50
    """
    loaded = load(recipe, overrides or ())
    size = parameters(loaded.model).total
    text = f"{recipe} is sound: {loaded.model.family}, {units.count(size)} parameters, {loaded.train.steps} steps"
    print_result({"recipe": recipe, "sound": True, "parameters": size}, json, text)


def show(recipe: RecipeArgument, overrides: Overrides = None, json: JsonOption = False) -> None:
    """Print a recipe with everything it extends, every override and every default filled in.

    Example: steelyard recipe show llama2-7b train.steps=50 > my.toml
    """
    settings = load(recipe, overrides or ()).settings()
    print_result(settings, json, to_toml(settings).rstrip())


def list_(json: JsonOption = False) -> None:
    """List the shipped recipes.

    Example: steelyard recipe list
    """
    recipes = {name: load(name) for name in shipped()}
    width = max(len(name) for name in recipes)
    lines = [
        f"{name:{width}}  {units.count(parameters(recipe.model).total):>6}  {recipe.description}"
        for name, recipe in recipes.items()
    ]
    result = {
        name: {"description": recipe.description, "parameters": parameters(recipe.model).total}
        for name, recipe in recipes.items()
    }
    print_result(result, json, "\n".join(lines))
