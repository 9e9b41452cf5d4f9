"""The planner's predictions before trials run: which points cannot run or fit, and which are most promising."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.load import COMMAND_LINE
from steelyard.launch import backends
from steelyard.planning import cluster as clusters
from steelyard.planning import measured_layers as profiles
from steelyard.planning import memory_fit, site_calibration
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import of_recipe
from steelyard.planning.measured_layers import Profile
from steelyard.planning.predict import Predictor
from steelyard.sizes.param_count import flops_per_token
from steelyard.sizes.rank_check import data_ranks
from steelyard.tune import this_machine
from steelyard.tune.candidate import recipe_at
from steelyard.tune.search_space import Point, Space, key
from steelyard.tune.spec import Tune
from steelyard.tune.submitted_trial import world_of

LOOKED_AT = 400  # points that are predicted to choose the first trials
METRICS = ("seconds", "tokens_per_second", "tflops")
FEWEST, MOST = 1, 8  # first trials in the planner's order


@dataclass(frozen=True)
class PointPrediction:
    """The prediction for a point: why it cannot run, or its predicted metrics."""

    why_not: str | None
    predicted: dict[str, float]


class PlannerPrior:
    """The planner's predictions for points of a recipe's space. For a command there are none."""

    def __init__(self, tune: Tune) -> None:
        self.tune = tune
        self._known: dict[str, PointPrediction] = {}
        self.cluster: Cluster | None = None
        self.profiles: list[Profile] = []
        if tune.recipe is None or not tune.plan:
            return
        if tune.cluster is not None:
            self.cluster = site_calibration.applied(clusters.load(tune.cluster), Path(tune.cluster))
            if self.cluster.ranks < (tune.ranks or 1):
                raise UserError(f"trials have {tune.ranks} ranks, but {tune.cluster} has {self.cluster.ranks} GPUs")
        self.profiles = [self._profile(Path(path)) for path in tune.profile]

    def _profile(self, path: Path) -> Profile:
        """Load a profile, which must have the recipe's layers and a device that trials run on."""
        profile, recipe = profiles.load(path), recipe_at(self.tune, {}, is_trial=True)
        cluster = self._machines(recipe, self.tune.ranks or 1)
        if cluster is None:
            raise UserError(
                "a profile needs a description of the machines", where=str(path),
                hint="set a cluster file: cluster = ..., or --cluster",
            )  # fmt: skip
        profile = _named_here(profile, cluster)
        if not any(_changes_layers(name) for name in self.tune.space):  # Otherwise it matches only some points.
            profiles.refuse_another(profile, recipe, path, cluster)
        return profile

    def _machines(self, recipe: Recipe, world: int) -> Cluster | None:
        """The machines of trials: the cluster file's nodes or, for local trials, this machine."""
        on = self.tune.launch.on
        if self.cluster is not None or not self.tune.plan or (on is not None and backends.load(on).is_remote):
            return self.cluster
        return this_machine.here(recipe, world)

    def of(self, point: Point) -> PointPrediction:
        """The prediction for a point, cached."""
        text = key(point)
        if text not in self._known:
            self._known[text] = PointPrediction(None, {}) if self.tune.recipe is None else self._predict(point)
        return self._known[text]

    def _predict(self, point: Point) -> PointPrediction:
        try:
            recipe = recipe_at(self.tune, point, is_trial=True)
            world = world_of(self.tune, recipe)
            data_ranks(recipe, world)
        except UserError as mistake:  # For example sizes that do not divide; the trial would fail the same way.
            return PointPrediction(_in_a_line(mistake), {})
        cluster = self._machines(recipe, world)
        if cluster is None:
            return PointPrediction(None, {})
        try:
            measured = [each for each in self.profiles if _is_of(each, recipe)]
            return _planned(_on(recipe, world), cluster, world, measured)
        except UserError:  # For example a precision with unknown peak. The point is run without a prediction.
            return PointPrediction(None, {})

    def first(self, space: Space, trials: int | None) -> list[Point]:
        """The first points to try, most promising first; empty if the objective is not speed."""
        if self.tune.recipe is None or not self.tune.plan or not self.tune.objectives[0].is_speed:
            return []
        chance = random.Random(self.tune.seed)
        points = space.grid()
        if points is None:
            points = list(space.drawn(chance, LOOKED_AT))
        if len(points) > LOOKED_AT:
            points = chance.sample(points, LOOKED_AT)
        return self.ordered(points)[: max(FEWEST, min(MOST, (trials or MOST) // 4))]

    def ordered(self, points: Sequence[Point]) -> list[Point]:
        """The points with a prediction, most promising first."""
        known = [(self.of(point).predicted, number) for number, point in enumerate(points)]
        goal = self.tune.objectives[0]
        metric = goal.metric if goal.metric in METRICS else "tokens_per_second"
        sign = -1 if metric != goal.metric or goal.direction == "maximize" else 1
        return [points[n] for _, n in sorted((sign * each[metric], n) for each, n in known if each)]


def _on(recipe: Recipe, world: int) -> Recipe:
    """The recipe with its data-parallel degree on `world` ranks."""
    parallel = recipe.parallel.model_copy(update={"data": recipe.parallel.data_for(world)})
    return recipe.model_copy(update={"parallel": parallel})


def _named_here(profile: Profile, cluster: Cluster) -> Profile:
    """The profile renamed to this machine's device, if it was measured on the same device."""
    if cluster.name != this_machine.HERE or profile.gpu not in this_machine.names():
        return profile
    return profile.model_copy(update={"gpu": this_machine.HERE})


def _changes_layers(name: str) -> bool:
    return name.startswith("model.") or name in ("data.sequence_length", "train.precision")


def _is_of(profile: Profile, recipe: Recipe) -> bool:
    try:
        profiles.refuse_another(profile, recipe, "")
    except UserError:
        return False
    return True


def _planned(recipe: Recipe, cluster: Cluster, world: int, measured: Sequence[Profile] = ()) -> PointPrediction:
    layout = of_recipe(recipe, cluster)
    predictor = Predictor.of_layout(recipe, cluster, layout, profiles=measured)
    rooms = memory_fit.rooms(predictor, layout)
    why_not = memory_fit.reason(rooms)
    if why_not is not None:
        return PointPrediction(why_not, {})
    seconds = predictor.parts(layout).total
    tokens = recipe.train.global_batch * recipe.data.sequence_length / seconds
    flops = flops_per_token(recipe.model, recipe.data.sequence_length)
    return PointPrediction(
        None,
        {
            "seconds": seconds,
            "tokens_per_second": tokens,
            "tflops": tokens * flops / world / 1e12,
            "peak_memory": float(max(room.memory.total for room in rooms)),
        },
    )


def _in_a_line(mistake: UserError) -> str:
    text = f"{mistake.message}; {mistake.hint}" if mistake.hint else mistake.message
    place = f"{mistake.where}: " if mistake.where and mistake.where != COMMAND_LINE else ""
    return " ".join(f"{place}{text}".split()).removeprefix(f"{COMMAND_LINE}: ")[:300]
