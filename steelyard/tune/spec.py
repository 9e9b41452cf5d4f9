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

[launch]
on = "slurm"                   # each trial a job of its own, as `steelyard submit --on slurm` starts one
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PrivateAttr, ValidationError

from steelyard.core.recipe import Recipe, shipped
from steelyard.core.recipe.loader import COMMAND_LINE, explained
from steelyard.core.recipe.section import Degree, NonNegativeInt, PositiveInt, Section, Seed
from steelyard.core.recipe.toml import name_after, place_of, read
from steelyard.tune import validation
from steelyard.tune.objective import Objective
from steelyard.tune.search_space import Dimension, Space

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
DIMENSION_KEYS = frozenset(Dimension.model_fields)


class TuneBudget(Section):
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


class Launching(Section):
    """Who starts a recipe's trials, as `steelyard submit` would; with no `on` the tuner does, beside itself."""

    on: str | None = Field(None, description="a backend, as `submit --on` takes it")
    site: str | None = None
    sites: str | None = Field(None, description="a file, instead of the user's sites.toml")
    hosts: list[str] | None = Field(None, description="mpi: instead of the site's")
    ranks_per_node: Degree | None = None
    time: str | None = Field(
        None, description="slurm: a job's time limit; left out: the site's, or the trial's timeout"
    )


class Tune(Section):
    """The whole file."""

    name: Annotated[str, Field(pattern=NAME, max_length=100)]
    recipe: str | None = None
    command: str | None = None
    nproc: Degree | None = Field(None, description="left out: 1, or, where jobs are submitted, the layout's")
    overrides: list[str] = Field([])
    drop: list[str] = Field([], description="keys of the recipe that trials leave out")
    cluster: str | None = Field(None, description="a cluster file; left out: this machine")
    profile: list[str] = Field([], description="files of `steelyard plan profile`, for the planner")
    plan: bool = Field(True, description="whether the planner prunes and orders trials")
    storage: str | None = None
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    seed: Seed = 0
    constraints: list[str] = Field([])
    space: Annotated[dict[str, Dimension], Field(min_length=1)]
    objectives: list[Objective] = Field([Objective(metric="tokens_per_second")], min_length=1)
    budget: TuneBudget = TuneBudget(trials=30)
    trial: TrialLimits = TrialLimits()
    early_stopping: EarlyStopping = EarlyStopping()
    launch: Launching = Launching()
    _override_places: list[str] = PrivateAttr([])

    @property
    def override_places(self) -> list[str]:
        """The places of those overrides that the file makes; the others are the command line's."""
        return self._override_places

    @property
    def ranks(self) -> int | None:
        """Ranks of every trial; None where they follow from each trial's own layout."""
        return self.nproc or (None if self.launch.on else 1)

    def identity(self) -> dict[str, Any]:
        """What may not change in a study: with another space or objective its trials would mean something else."""
        kept = ("recipe", "command", "overrides", "drop", "constraints", "space", "objectives")
        settings = self.model_dump(mode="json", exclude_none=True)
        launch = {key: settings["launch"][key] for key in ("on", "site", "ranks_per_node") if key in settings["launch"]}
        found = {key: settings[key] for key in kept if key in settings} | {"steps": self.trial.steps}
        return found | {"nproc": self.ranks} | ({"launch": launch} if launch else {})

    def searched(self) -> Space:
        """Its space, with constraints."""
        return Space(self.space, self.constraints, self.ranks)


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
    """A tune file's values, checked, each mistake told with its line."""
    if isinstance(values.get("space"), dict):
        values["space"] = _flat(values["space"])
    overridden = values.get("overrides")
    places = places | {name: COMMAND_LINE for name in changes or {} if name != "overrides"}
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
    if "overrides" in places and isinstance(overridden, list):
        tune._override_places = [place_of("overrides", places) or source] * len(overridden)
    validation.refuse(tune, places, source)
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
