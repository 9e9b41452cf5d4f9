"""What the report of a study says, and what it must not say from too few trials."""

from pathlib import Path

import optuna
import pytest

from steelyard.tune import outcome, spec, study_report

TUNE = """
recipe = "tiny.toml"
[space]
"train.micro_batch" = [1, 2, 4]
"optim.learning_rate" = { low = 1e-4, high = 1e-1, log = true }
[[objectives]]
metric = "tokens_per_second"
goal = "maximize"
[budget]
trials = 40
"""


@pytest.fixture
def tune(in_workplace) -> spec.Tune:
    (in_workplace.path / "speed.toml").write_text(TUNE.replace("tiny.toml", in_workplace.recipe.name))
    return spec.load("speed.toml")


def study_of(tune: spec.Tune, finished: int) -> optuna.Study:
    study = optuna.create_study(direction="maximize")
    space = {
        "train.micro_batch": optuna.distributions.CategoricalDistribution([1, 2, 4]),
        "optim.learning_rate": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
    }
    for number in range(finished):
        speed = 100.0 + 10 * (number % 3) + number
        study.add_trial(
            optuna.trial.create_trial(
                params={"train.micro_batch": (1, 2, 4)[number % 3], "optim.learning_rate": 1e-4 * (1 + number)},
                distributions=space,
                values=[speed],
                user_attrs={
                    "ended": {"outcome": outcome.FINISHED, "seconds": 1.0, "values": [speed]},
                    "predicted": {"tokens_per_second": 2 * speed, "seconds": 0.1},
                },
            )
        )
    return study


def test_importance_needs_ten_finished_trials(tune: spec.Tune):
    page = study_report.render(tune, study_of(tune, 9))
    assert "Needs 10 finished trials; 9 have finished." in page
    assert "class='share'" not in page
    page = study_report.render(tune, study_of(tune, 12))
    assert "Needs 10 finished trials" not in page
    assert "class='share'" in page


def test_every_trial_has_its_prediction_beside_its_measurement(tune: spec.Tune):
    study = study_of(tune, 3)
    page = study_report.render(tune, study)
    table = page[page.index("<h2>Trials</h2>") :]
    assert "predicted tokens_per_second" in table
    assert "measured / predicted" in table
    for trial in study.get_trials():
        assert f">{trial.values[0]:.6g}<" in table
        assert f">{2 * trial.values[0]:.6g}<" in table
    assert table.count(">0.50<") == 3


def test_a_study_without_predictions_has_no_columns_for_them(tune: spec.Tune):
    study = optuna.create_study(direction="maximize")
    assert "predicted" not in study_report.render(tune, study)
    assert Path("speed.toml").exists()
