"""TUNE.toml: what is tuned, over which settings, judged by what, and for how long.

recipe = "my.toml"             # or command = "bash train.sh --tp {tp} --mbs {mbs}"
nproc = 4                      # ranks of a recipe's trial
constraints = ["parallel.tensor * parallel.pipeline <= world"]

[space]                        # any key of the recipe, or the command's placeholders
train.micro_batch = { choice = [1, 2, 4, 8] }
optim.learning_rate = { low = 1e-4, high = 1e-2, log = true }

[[objectives]]
metric = "tokens_per_second"   # or regex = 'ms per step: ([0-9.]+)' with a goal
skip = 5                       # steps, or matches, of warm-up

[budget]
trials = 30
hours = 2.0

[trial]
steps = 20
timeout_minutes = 30.0
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, shipped
from steelyard.core.recipe.load import explained, valid_keys
from steelyard.core.recipe.section import Section
from steelyard.core.recipe.toml import parse
from steelyard.tune import command as commands
from steelyard.tune.expression import Refused
from steelyard.tune.objective import Objective
from steelyard.tune.space import Dimension, Space

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
DIMENSION_KEYS = frozenset(Dimension.model_fields)


class Budget(Section):
    """When a study is done: so many trials, or so many hours in which trials ran, whichever comes first."""

    trials: PositiveInt | None = None
    hours: PositiveFloat | None = None


class TrialLimits(Section):
    """How long a trial is, and how long it may take."""

    steps: PositiveInt | None = Field(None, description="left out: the recipe's own")
    timeout_minutes: PositiveFloat = 60.0
    hang_minutes: PositiveFloat = Field(10.0, description="without a line of output or a record")


class EarlyStopping(Section):
    """When a trial is far behind: worse than the median of others at the same step, and than the best by `margin`."""

    enabled: bool = True
    trials: PositiveInt = Field(3, description="that must have ended well before any is stopped")
    after: NonNegativeInt = Field(2, description="records beyond the warm-up before it is judged")
    margin: NonNegativeFloat = 0.3


class Tune(Section):
    """The whole file."""

    name: Annotated[str, Field(pattern=NAME, max_length=100)]
    recipe: str | None = None
    command: str | None = None
    nproc: PositiveInt = 1
    overrides: list[str] = Field([])
    drop: list[str] = Field([], description="keys of the recipe that trials leave out")
    cluster: str | None = Field(None, description="a cluster file; left out: this machine")
    plan: bool = Field(True, description="whether the planner prunes and orders trials")
    storage: str | None = None
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    seed: NonNegativeInt = 0
    constraints: list[str] = Field([])
    space: Annotated[dict[str, Dimension], Field(min_length=1)]
    objectives: list[Objective] = Field([Objective(metric="tokens_per_second")], min_length=1)
    budget: Budget = Budget(trials=30)
    trial: TrialLimits = TrialLimits()
    early_stopping: EarlyStopping = EarlyStopping()

    def identity(self) -> dict[str, Any]:
        """What may not change in a study: with another space or objective its trials would mean something else."""
        kept = ("recipe", "command", "nproc", "overrides", "drop", "constraints", "space", "objectives")
        settings = self.model_dump(mode="json", exclude_none=True)
        return {key: settings[key] for key in kept if key in settings} | {"steps": self.trial.steps}

    def searched(self) -> Space:
        """Its space, with constraints."""
        return Space(self.space, self.constraints, self.nproc)


def is_tune_file(source: str) -> bool:
    """Whether a name is a tune file rather than a recipe: it has a space, and no model."""
    if source in shipped() and not Path(source).is_file():
        return False
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return False
    return re.search(r"^\s*(\[space|space\b|\[\[objectives|command\s*=|\[budget)", text, re.MULTILINE) is not None


def load(path: str | Path, changes: dict[str, Any] | None = None) -> Tune:
    """Read and check a tune file; `changes` are what the command line says instead."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("this is not a text file", where=str(path), mend="a tune file is UTF-8 TOML") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    values, places = parse(text, str(path))
    values.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", path.name.removesuffix(".toml")).strip("-.") or "study")
    for name in ("recipe", "cluster"):
        if isinstance(values.get(name), str):
            values[name] = beside(path, values[name])
    return checked(values, places, str(path), changes)


def checked(values: dict[str, Any], places: dict[str, str], source: str, changes: dict[str, Any] | None = None) -> Tune:
    """A tune file's values, checked, each mistake told with its line."""
    if isinstance(values.get("space"), dict):
        values["space"] = _flat(values["space"])
    for name, value in (changes or {}).items():
        section, _, key = name.rpartition(".")
        if name == "overrides" and isinstance(values.get(name), list):
            value = [*values[name], *value]  # The last word on a key counts.
        table = values.setdefault(section, {}) if section else values
        if isinstance(table, dict):  # What is no table is refused below, by its line.
            table[key] = value
    try:
        tune = Tune.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, source, Tune) from None
    _refuse(tune, places, source)
    return tune


def beside(file: Path, name: str) -> str:
    """A file named in another: beside it where it is there, otherwise as it is written."""
    near = file.parent / Path(name).expanduser()
    return str(near) if near.is_file() else name


def _flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`train.micro_batch = {...}` under [space] is a table in a table; a setting is the innermost one."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        is_section = name in Recipe.model_fields and not prefix
        if isinstance(value, dict) and value and (is_section or not _is_setting(value)):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = {"choice": value} if isinstance(value, list) else value
    return flat


def _is_setting(table: dict[str, Any]) -> bool:
    """Whether a table is a setting's own, misspelt perhaps, rather than one of settings."""
    near = any(difflib.get_close_matches(key, DIMENSION_KEYS, n=1) for key in table)
    return near or not all(isinstance(inner, dict | list) for inner in table.values())


def _refuse(tune: Tune, places: dict[str, str], source: str) -> None:
    """Refuse what is fine alone and wrong together, with its line."""

    def wrong(key: str, message: str, mend: str | None = None) -> UserError:
        place = next((places[at] for at in _upwards(key) if at in places), source)
        return UserError(f"{key}: {message}", where=place, mend=mend)

    if (tune.recipe is None) == (tune.command is None):
        raise wrong("recipe", "give either a recipe or a command to tune", 'recipe = "my.toml"')
    for name, dimension in tune.space.items():
        problem = dimension.problem()
        if problem is not None:
            raise wrong(f"space.{name}", problem, "like { choice = [1, 2, 4] } or { low = 1, high = 8 }")
    try:
        tune.searched()
    except Refused as refused:
        text = next(text for text in tune.constraints if _is_refused(tune, text))
        raise wrong("constraints", f"{text!r}: {refused}") from None
    if tune.command is not None:
        _refuse_command(tune, wrong)
    else:
        _refuse_keys(tune, wrong)
    if tune.budget.trials is None and tune.budget.hours is None:
        raise wrong("budget", "a study ends after so many trials or hours", "trials = 30")
    labels = [each.label for each in tune.objectives]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise wrong("objectives", f"two are called {twice}", 'give each a name = "..."')
    if tune.command is not None and "objectives" not in tune.model_fields_set:
        raise wrong("objectives", "a command needs an objective", "[[objectives]] with regex and goal")


def _refuse_keys(tune: Tune, wrong: Any) -> None:
    """A setting that no recipe has would be refused by every trial, and a key to drop that is misspelt by none."""
    known = sorted(valid_keys(Recipe))
    for name, place in [*((name, f"space.{name}") for name in tune.space), *((name, "drop") for name in tune.drop)]:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            mend = f"did you mean {near[0]}?" if near else "steelyard recipe show prints every valid key"
            raise wrong(place, "is no key of a recipe" if place != "drop" else f"{name} is no key of a recipe", mend)


def _refuse_command(tune: Tune, wrong: Any) -> None:
    try:
        words = commands.words(str(tune.command))
    except ValueError as error:
        raise wrong("command", f"cannot be split into words: {error}", "close every quote") from None
    if not words:
        raise wrong("command", "is empty")
    idle = {"overrides": tune.overrides, "drop": tune.drop, "cluster": tune.cluster, "trial.steps": tune.trial.steps}
    for name, value in idle.items():
        if value:
            raise wrong(name, "says something about a recipe, and this is a command", "put it into the command")
    taken = next((name for name in commands.OWN if name in tune.space), None)
    if taken is not None:
        raise wrong(f"space.{taken}", f"every trial has its own {{{taken}}}", "give the setting another name")
    used = commands.placeholders(words)
    unknown = sorted(used - tune.space.keys() - set(commands.OWN))
    if unknown:
        mend = f"add it to [space], or write {{{{{unknown[0]}}}}} for the word itself"
        raise wrong("command", f"{{{unknown[0]}}} is not in the space", mend)
    unused = sorted(tune.space.keys() - used)
    if unused:
        raise wrong(f"space.{unused[0]}", "the command does not use it", f"put {{{unused[0]}}} into the command")


def _is_refused(tune: Tune, text: str) -> bool:
    try:
        Space(tune.space, [text], tune.nproc)
    except Refused:
        return True
    return False


def _upwards(key: str) -> Sequence[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
