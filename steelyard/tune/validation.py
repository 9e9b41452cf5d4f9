"""Validation of a tune file across its keys, before anything runs. Errors have their line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.load import nearest, valid_keys
from steelyard.core.recipe.toml import place_of
from steelyard.launch import backends
from steelyard.launch.backends import Option
from steelyard.tune import command as commands
from steelyard.tune.expression import ExpressionError
from steelyard.tune.search_space import Space

if TYPE_CHECKING:
    from steelyard.tune.spec import Tune

Wrong = Callable[..., UserError]


def refuse(tune: Tune, places: Mapping[str, str], source: str) -> None:
    """Reject settings that contradict each other, with their line."""

    def wrong(key: str, message: str, hint: str | None = None) -> UserError:
        return UserError(f"{key}: {message}", where=place_of(key, places) or source, hint=hint)

    if (tune.recipe is None) == (tune.command is None):
        raise wrong("recipe", "set either a recipe or a command to tune", 'recipe = "my.toml"')
    for name, dimension in tune.space.items():
        problem = dimension.problem()
        if problem is not None:
            raise wrong(f"space.{name}", problem, "for example { choice = [1, 2, 4] } or { low = 1, high = 8 }")
    try:
        tune.searched()
    except ExpressionError as refused:
        text = next(text for text in tune.constraints if _is_refused(tune, text))
        hint = (
            "set nproc, for example 16; otherwise ranks follow from each layout"
            if str(refused).startswith("world ")
            else None
        )
        raise wrong("constraints", f"{text!r}: {refused}", hint) from None
    if tune.command is not None:
        _refuse_command(tune, wrong)
    else:
        _refuse_keys(tune, wrong)
        _refuse_launch(tune, wrong)
    if tune.budget.trials is None and tune.budget.hours is None:
        raise wrong("budget", "a study needs a number of trials or hours", "trials = 30")
    labels = [each.label for each in tune.objectives]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise wrong("objectives", f"two objectives are called {twice}", 'set a different name = "..." for each')
    if tune.command is not None and "objectives" not in tune.model_fields_set:
        raise wrong("objectives", "a command needs an objective", "[[objectives]] with regex and goal")


def _refuse_keys(tune: Tune, wrong: Wrong) -> None:
    """Reject unknown keys. In [space] they would fail in every trial; in drop they would be ignored."""
    known = set(valid_keys(Recipe))
    for name, place in [*((name, f"space.{name}") for name in tune.space), *((name, "drop") for name in tune.drop)]:
        if name not in known:
            message = "not a key of a recipe" if place != "drop" else f"{name} is not a key of a recipe"
            raise wrong(place, message, nearest(name))


def _refuse_launch(tune: Tune, wrong: Wrong) -> None:
    """Reject launch settings that the backend does not support."""
    launch = tune.launch
    for name in sorted(launch.model_fields_set - {"on"}):
        if launch.on is None and getattr(launch, name) is not None:
            raise wrong(f"launch.{name}", "is only for submitted jobs", 'set on = "slurm", or use --on slurm')
    if launch.on is not None:
        if launch.on not in backends.names():
            raise wrong("launch.on", f"there is no backend {launch.on}", f"backends: {', '.join(backends.names())}")
        takes = backends.load(launch.on).takes
        if launch.hosts is not None and Option.HOSTS not in takes:
            raise wrong("launch.hosts", f"{launch.on} {Option.HOSTS}", "remove the key")
        if launch.time is not None and Option.TIME not in takes:
            raise wrong("launch.time", f"{launch.on} {Option.TIME}", "set trial.timeout_minutes")
    per_node, ranks = launch.ranks_per_node, tune.nproc
    if per_node is not None and ranks is not None and ranks % per_node and ranks > per_node:
        raise wrong("launch.ranks_per_node", f"{ranks} ranks do not fill nodes of {per_node}")


def _refuse_command(tune: Tune, wrong: Wrong) -> None:
    try:
        words = commands.words(str(tune.command))
    except ValueError as error:
        raise wrong("command", f"cannot be split into arguments: {error}", "close every quote") from None
    if not words:
        raise wrong("command", "is empty")
    idle = {"overrides": tune.overrides, "drop": tune.drop, "cluster": tune.cluster, "trial.steps": tune.trial.steps}
    for name, value in (idle | {"profile": tune.profile, "launch.on": tune.launch.on}).items():
        if value:
            raise wrong(name, "is only for recipes, not for commands", "put it into the command")
    taken = next((name for name in commands.OWN if name in tune.space), None)
    if taken is not None:
        raise wrong(f"space.{taken}", f"{{{taken}}} is set for every trial", "rename the setting")
    used = commands.placeholders(words)
    unknown = sorted(used - tune.space.keys() - set(commands.OWN))
    if unknown:
        hint = f"add it to [space], or write {{{{{unknown[0]}}}}} for literal braces"
        raise wrong("command", f"{{{unknown[0]}}} is not in the space", hint)
    unused = sorted(tune.space.keys() - used)
    if unused:
        raise wrong(f"space.{unused[0]}", "the command does not use it", f"put {{{unused[0]}}} into the command")


def _is_refused(tune: Tune, text: str) -> bool:
    try:
        Space(tune.space, [text], tune.ranks)
    except ExpressionError:
        return True
    return False
