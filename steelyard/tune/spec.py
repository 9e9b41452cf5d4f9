"""TUNE.toml, the tune file: recipe or command, search space, objectives and budget.

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

[launch]
on = "slurm"                   # each trial is a job, as `steelyard submit --on slurm` starts one
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PrivateAttr, ValidationError

from steelyard.core.recipe import Recipe, shipped
from steelyard.core.recipe.load import COMMAND_LINE, explained
from steelyard.core.recipe.section import Degree, NonNegativeInt, PositiveInt, Section, Seed
from steelyard.core.recipe.toml import name_after, place_of, read
from steelyard.tune import validation
from steelyard.tune.objective import Objective
from steelyard.tune.search_space import Dimension, Space

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
DIMENSION_KEYS = frozenset(Dimension.model_fields)


class TuneBudget(Section):
    """When a study is done: number of trials, or hours in which trials ran, whichever comes first."""

    trials: PositiveInt | None = None
    hours: PositiveFloat | None = None


class TrialSection(Section):
    """Length and time limits of a trial."""

    steps: PositiveInt | None = Field(None, description="default: the recipe's")
    timeout_minutes: PositiveFloat = 60.0
    hang_minutes: PositiveFloat = Field(10.0, description="without a line of output or a record")


class EarlyStopping(Section):
    """Stop trials that are worse than the median at the same step, and worse than the best by `margin`."""

    enabled: bool = True
    trials: PositiveInt = Field(3, description="that must have finished before any is stopped")
    after: NonNegativeInt = Field(2, description="records after the warm-up before it is compared")
    margin: NonNegativeFloat = 0.3


class LaunchSection(Section):
    """The backend that runs a recipe's trials, as in `steelyard submit`; without `on` they run on this machine."""

    on: str | None = Field(None, description="a backend, as in `submit --on`")
    site: str | None = None
    sites: str | None = Field(None, description="a file, instead of the user's sites.toml")
    hosts: list[str] | None = Field(None, description="mpi: instead of the site's")
    ranks_per_node: Degree | None = None
    time: str | None = Field(None, description="slurm: a job's time limit; default: the site's, or the trial's timeout")


class Tune(Section):
    """A tune file."""

    name: Annotated[str, Field(pattern=NAME, max_length=100)]
    recipe: str | None = None
    command: str | None = None
    nproc: Degree | None = Field(None, description="default: 1, or for submitted jobs the layout's")
    overrides: list[str] = Field([])
    drop: list[str] = Field([], description="keys of the recipe that trials omit")
    cluster: str | None = Field(None, description="a cluster file; default: this machine")
    profile: list[str] = Field([], description="files of `steelyard plan profile`, for the planner")
    plan: bool = Field(True, description="whether the planner prunes and orders trials")
    storage: str | None = None
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    seed: Seed = 0
    constraints: list[str] = Field([])
    space: Annotated[dict[str, Dimension], Field(min_length=1)]
    objectives: list[Objective] = Field([Objective(metric="tokens_per_second")], min_length=1)
    budget: TuneBudget = TuneBudget(trials=30)
    trial: TrialSection = TrialSection()
    early_stopping: EarlyStopping = EarlyStopping()
    launch: LaunchSection = LaunchSection()
    _override_places: list[str] = PrivateAttr([])

    @property
    def override_places(self) -> list[str]:
        """The source lines of the file's overrides. The other overrides are from the command line."""
        return self._override_places

    @property
    def ranks(self) -> int | None:
        """Ranks of every trial; None if they depend on each trial's layout."""
        return self.nproc or (None if self.launch.on else 1)

    def identity(self) -> dict[str, Any]:
        """The settings that must not change in a study, because its trials would no longer be comparable."""
        fixed = ("recipe", "command", "overrides", "drop", "constraints", "space", "objectives")
        settings = self.model_dump(mode="json", exclude_none=True)
        launch = {key: settings["launch"][key] for key in ("on", "site", "ranks_per_node") if key in settings["launch"]}
        identity = {key: settings[key] for key in fixed if key in settings} | {"steps": self.trial.steps}
        return identity | {"nproc": self.ranks} | ({"launch": launch} if launch else {})

    def searched(self) -> Space:
        """The search space, with constraints."""
        return Space(self.space, self.constraints, self.ranks)


def is_tune_file(source: str) -> bool:
    """Whether a name is a tune file rather than a recipe."""
    if source in shipped() and not Path(source).is_file():
        return False
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return False
    return re.search(r"^\s*(\[space|space\b|\[\[objectives|command\s*=|\[budget)", text, re.MULTILINE) is not None


def load(path: str | Path, changes: dict[str, Any] | None = None) -> Tune:
    """Read and validate a tune file; `changes` are settings from the command line."""
    path = Path(path)
    values, places = read(path, "a tune file")
    values.setdefault("name", name_after(path, "study"))
    if isinstance(values.get("profile"), str):
        values["profile"] = [values["profile"]]
    if isinstance(values.get("profile"), list):
        values["profile"] = [beside(path, name) if isinstance(name, str) else name for name in values["profile"]]
    for table, name in ((values, "recipe"), (values, "cluster"), (values.get("launch"), "sites")):
        if isinstance(table, dict) and isinstance(table.get(name), str):
            table[name] = beside(path, table[name])
    return checked(values, places, str(path), changes)


def checked(values: dict[str, Any], places: dict[str, str], source: str, changes: dict[str, Any] | None = None) -> Tune:
    """Validate the values of a tune file. Errors are reported with their line."""
    if isinstance(values.get("space"), dict):
        values["space"] = _flat(values["space"])
    overridden = values.get("overrides")
    places = places | {name: COMMAND_LINE for name in changes or {} if name != "overrides"}
    for name, value in (changes or {}).items():
        section, _, key = name.rpartition(".")
        if name == "overrides" and isinstance(values.get(name), list):
            value = [*values[name], *value]  # The last override of a key wins.
        table = values.setdefault(section, {}) if section else values
        if isinstance(table, dict):  # Other types are rejected below, with their line.
            table[key] = value
    try:
        tune = Tune.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, source, Tune) from None
    if "overrides" in places and isinstance(overridden, list):
        tune._override_places = [place_of("overrides", places) or source] * len(overridden)
    validation.refuse(tune, places, source)
    return tune


def beside(file: Path, name: str) -> str:
    """A path in a file: relative to that file if it exists there, otherwise as written."""
    near = file.parent / Path(name).expanduser()
    return str(near) if near.is_file() else name


def _flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten [space]: `train.micro_batch = {...}` is a nested table, and the innermost table is the setting."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        is_section = name in Recipe.model_fields and not prefix
        if isinstance(value, dict) and value and (is_section or not _is_setting(value)):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = {"choice": value} if isinstance(value, list) else value
    return flat


def _is_setting(table: dict[str, Any]) -> bool:
    """Whether a table is a setting, possibly with misspelt keys, rather than a table of settings."""
    near = any(difflib.get_close_matches(key, DIMENSION_KEYS, n=1) for key in table)
    return near or not all(isinstance(inner, dict | list) for inner in table.values())
