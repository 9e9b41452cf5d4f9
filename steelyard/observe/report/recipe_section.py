"""The recipe of a run, or the keys in which the recipes of several differ."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core import secrets
from steelyard.core.pages import page
from steelyard.core.recipe import Recipe, to_toml
from steelyard.core.recipe.toml import leaves
from steelyard.core.run import Run


def recipes(runs: dict[str, Run]) -> list[str]:
    """The recipe of one run; of several the differences and, folded, all of them."""
    found = {name: run.recipe() for name, run in runs.items()}
    if len(found) == 1:
        return [page.text(_text(next(iter(found.values()))))]
    rows = [[key, *values] for key, values in differences(list(found.values()))]
    what = page.table(rows, head=["differs in", *found]) if rows else page.paragraph("All have the same recipe.")
    return [what, *(page.folded(f"recipe of {name}", _text(recipe)) for name, recipe in found.items())]


def differences(found: Sequence[Recipe | None]) -> list[tuple[str, list[str]]]:
    """The keys whose values differ, sorted, each with its value in every recipe, without secrets."""
    flat = [{} if recipe is None else dict(leaves(recipe.settings())) for recipe in found]
    keys = sorted({key for settings in flat for key in settings})
    return [
        (key, [secrets.scrub(str(settings.get(key, "unset"))) for settings in flat])
        for key in keys
        if len({repr(settings.get(key)) for settings in flat}) > 1
    ]


def _text(recipe: Recipe) -> str:
    """The recipe as TOML without secrets: a URL in it may contain a password."""
    return secrets.scrub(to_toml(recipe.settings()))
