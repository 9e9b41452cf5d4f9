"""Early stopping: compares the values of a running trial with those of finished trials at the same step.

A trial is stopped if it is worse than the median and worse than the best by a margin, in every objective, after its
warm-up. The median alone would stop half of all trials; the margin alone would stop losses that only start slowly.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steelyard.tune import outcome
from steelyard.tune.objective import ObjectiveValues, at_step
from steelyard.tune.spec import Tune
from steelyard.tune.trial_history import reported, result_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


class TrialPruner:
    """The rule for one trial; a call returns the reason to stop, or None."""

    def __init__(self, tune: Tune, trials: Sequence[FrozenTrial], measured: Sequence[ObjectiveValues]) -> None:
        self.rule, self.measured = tune.early_stopping, measured
        done = [reported(trial, "curves", []) for trial in trials if result_of(trial) == outcome.FINISHED]
        self.curves = [curves for curves in done if len(curves) == len(measured)]
        self._judged = -1

    def __call__(self) -> str | None:
        """The reason to stop the trial now, or None."""
        if not self.rule.enabled or len(self.curves) < self.rule.trials:
            return None
        records = min(len(each.curve) for each in self.measured)
        if records <= self.rule.after or records == self._judged:
            return None
        self._judged = records
        reasons = [self._behind(index, each) for index, each in enumerate(self.measured)]
        return None if None in reasons else reasons[0]

    def _behind(self, index: int, measured: ObjectiveValues) -> str | None:
        step, value = measured.curve[-1]
        others = [at for curves in self.curves if (at := at_step(curves[index], step)) is not None]
        if len(others) < self.rule.trials:
            return None
        goal = measured.objective
        best, median = (max if goal.direction == "maximize" else min)(others), statistics.median(others)
        is_far = abs(best - value) > self.rule.margin * abs(best)
        if goal.better(median, value) and goal.better(best, value) and is_far:
            return f"{goal.label} was {value:.6g} at step {step}; the best trial had {best:.6g}"
        return None
