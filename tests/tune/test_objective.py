"""One number from many, and when a trial is far behind."""

import math
from types import SimpleNamespace

import pytest

from steelyard.tune.objective import Objective, ObjectiveValues, at_step
from steelyard.tune.pruner import TrialPruner
from steelyard.tune.spec import EarlyStopping


@pytest.mark.parametrize(
    ("pick", "value"),
    [("first", 4), ("last", 2), ("min", 1), ("max", 4), ("mean", 7 / 3), ("median", 2), ("harmonic_mean", 12 / 7)],
)
def test_records_past_the_warm_up_become_one_number(pick, value):
    measured = ObjectiveValues(Objective(metric="speed", goal="maximize", pick=pick, skip=2))
    for step, speed in enumerate([900.0, None, 4.0, 1.0, 2.0], start=1):
        measured.record({"step": step, "speed": speed})
        measured.record({"step": step, "valid_loss": 1.0})
        measured.line("speed 7")
    assert measured.value == pytest.approx(value)


def test_a_regular_expression_finds_numbers_in_lines():
    measured = ObjectiveValues(Objective(regex=r"iteration \(ms\): ([\d,.]+)", goal="minimize", pick="mean", skip=1))
    for line in (
        "iteration (ms): 9,000.5",
        "nothing",
        "iteration (ms): 1,000.5 iteration (ms): 2.5",
        "iteration (ms): .",
    ):
        measured.line(line)
    assert measured.value == pytest.approx((1000.5 + 2.5) / 2)
    assert [step for step, _ in measured.curve] == [2, 3]


@pytest.mark.parametrize("pick", ["min", "max", "mean", "median", "harmonic_mean", "last"])
def test_one_number_that_is_none_spoils_what_is_made_of_all(pick):
    measured = ObjectiveValues(Objective(metric="loss", pick=pick))
    for step, value in enumerate([3.0, math.nan, 1.0], start=1):
        measured.record({"step": step, "loss": value})
    assert measured.value == 1.0 if pick == "last" else math.isnan(measured.value)


@pytest.mark.parametrize(
    ("regex", "skip", "why"),
    [
        ("ms: ([0-9.]+)", 0, "time was not found"),
        ("lap [0-9.]+", 0, "time matched 'lap 3', which is not a number: put a group ( ) around the number"),
        ("(lap) [0-9.]+", 0, "time matched 'lap', which is not a number"),
        ("lap ([0-9.]+)", 3, "time was found 2 times, all within skip = 3"),
        ("lap ([0-9.]+)", 1, None),
    ],
)
def test_why_nothing_was_measured_is_told(regex, skip, why):
    measured = ObjectiveValues(Objective(name="time", regex=regex, goal="minimize", skip=skip))
    for line in ("lap 3", "lap 4"):
        measured.line(line)
    assert measured.missing() == why


def test_many_matches_take_no_longer_than_their_trial():
    measured = ObjectiveValues(Objective(regex=r"ms (\d+)", pick="harmonic_mean", goal="minimize"))
    for number in range(5_000):
        measured.line(f"ms {number % 7 + 1}")
    assert 150 <= len(measured.curve) <= 1_000  # Each place of it has looked at all numbers before.


def test_a_curve_is_read_at_the_last_step_before():
    assert at_step([(2, 5.0), (4, 6.0)], 3) == 5.0
    assert at_step([(2, 5.0), (4, 6.0)], 1) is None


def _others(*curves):
    done = SimpleNamespace(is_finished=lambda: True, name="COMPLETE")
    return [
        SimpleNamespace(state=done, user_attrs={"ended": {"outcome": "finished", "curves": [curve]}})
        for curve in curves
    ]


@pytest.mark.parametrize(
    ("goal", "others", "mine", "stops"),
    [
        ("maximize", [100, 90, 80], 50, True),
        ("maximize", [100, 90, 80], 75, False),  # Behind the median, not far behind the best.
        ("maximize", [100, 40, 30], 50, False),  # Far behind the best, before the median.
        ("minimize", [2.0, 2.1, 2.2], 4.0, True),
        ("minimize", [2.0, 2.1, 2.2], 1.0, False),
        ("maximize", [100, 90], 1, False),  # Too few to tell.
    ],
)
def test_a_trial_far_behind_is_stopped(goal, others, mine, stops):
    objective = Objective(metric="m", goal=goal)
    measured = ObjectiveValues(objective)
    tune = SimpleNamespace(early_stopping=EarlyStopping(after=2, margin=0.3))
    rule = TrialPruner(tune, _others(*[[(step, float(value)) for step in (1, 2, 3)] for value in others]), [measured])
    for step in (1, 2):
        measured.record({"step": step, "m": float(mine)})
        assert rule() is None
    measured.record({"step": 3, "m": float(mine)})
    assert (rule() is not None) is stops
