"""Steps whose gradient is no number: fp16's scale learns from them, others are skipped, counted and bounded."""

import json
import math
from itertools import pairwise

import pytest

from steelyard import training
from steelyard.core.errors import RuntimeFailure
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
from steelyard.observe import report
from steelyard.training.extension import Extension
from steelyard.training.train_state import LossScale

FP16 = ["train.precision=fp16", "log.every=1", "eval.every=0", "checkpoint.every=0"]


def steps(run: Run) -> list[dict]:
    return [record for record in run.metrics() if "loss" in record]


class Poison(Extension):
    """Makes the gradient of some steps NaN."""

    def __init__(self, *poisoned: int) -> None:
        self.poisoned, self.step = poisoned, 0

    def begin_step(self, step, batch, loss_scale):
        self.step = step

    def loss(self, stage):
        return stage.norm.weight.sum() * (math.nan if self.step in self.poisoned else 0.0)


def test_a_scale_that_overflows_is_halved_until_it_works(in_workplace):
    settings = ["train.loss_scale=1e8", "train.nonfinite_limit=50", "optim.warmup_steps=4", "optim.schedule=constant"]
    recorded = steps(training.run(load_recipe("tiny.toml", [*FP16, *settings])))
    skipped = [record["skipped"] for record in recorded]
    assert skipped[:4] == [1, 2, 3, 4]
    assert skipped[-1] < 15
    assert [record["grad_norm"] is None for record in recorded] == [
        after > before for before, after in pairwise([0, *skipped])
    ]
    assert [record["loss_scale"] for record in recorded] == [1e8 / 2**count for count in skipped]
    assert [record["samples"] for record in recorded] == [4 * step for step in range(1, 21)]
    assert recorded[-1]["nonfinite"] == 0
    # The schedule waits: the first step that counts has the first rate of the climb.
    counting = [step - before for step, before in enumerate([0, *skipped[:-1]], start=1)]
    assert [record["learning_rate"] for record in recorded] == [1e-2 * min(4, step) / 4 for step in counting]
    # Weights did not move: other samples of an untrained model give the loss of knowing nothing.
    assert all(record["loss"] == pytest.approx(math.log(97), abs=0.1) for record in recorded[:4])


def test_a_good_scale_changes_nothing_and_grows_after_its_window(in_workplace):
    steady = steps(training.run(load_recipe("tiny.toml", [*FP16, "name=steady", "train.loss_scale=1024"])))
    growing = steps(
        training.run(
            load_recipe("tiny.toml", [*FP16, "name=growing", "train.loss_scale=8", "train.loss_scale_window=3"])
        )
    )
    assert [record["loss_scale"] for record in growing[:7]] == [8, 8, 16, 16, 16, 32, 32]
    assert {record["loss_scale"] for record in steady} == {1024}
    assert [record["loss"] for record in growing] == pytest.approx([record["loss"] for record in steady], rel=1e-2)
    assert [record["grad_norm"] for record in growing[:2]] == pytest.approx(
        [record["grad_norm"] for record in steady[:2]], rel=1e-2
    )


def test_a_scale_never_falls_below_one():
    scale = LossScale(2.0, window=2)
    for _ in range(5):
        scale.after(overflowed=True)
    assert scale.scale == 1.0
    scale.after(overflowed=False)
    scale.after(overflowed=True)
    scale.after(overflowed=False)
    assert scale.scale == 1.0  # Good steps count from the last overflow.
    scale.after(overflowed=False)
    assert scale.scale == 2.0


def test_a_resumed_run_keeps_its_scale_and_counts(in_workplace):
    settings = [*FP16, "train.loss_scale=1e12", "train.loss_scale_window=4", "train.nonfinite_limit=50"]
    settings += ["optim.decay_steps=20"]
    whole = training.run(load_recipe("tiny.toml", [*settings, "name=whole"]))
    training.run(load_recipe("tiny.toml", [*settings, "name=parts", "train.steps=3"]))
    training.run(load_recipe("tiny.toml", [*settings, "name=parts", "train.steps=13"]))
    parts = training.run(load_recipe("tiny.toml", [*settings, "name=parts"]))
    assert steps(parts)[-1]["skipped"] > 3
    assert (
        steps(parts)[-1].items()
        >= {key: steps(whole)[-1][key] for key in ("loss", "loss_scale", "skipped", "learning_rate")}.items()
    )
    assert [record["loss"] for record in steps(parts)] == [record["loss"] for record in steps(whole)]


def test_a_step_whose_gradient_is_no_number_is_skipped_and_counted(in_workplace):
    settings = ["log.every=1", "eval.every=0", "optim.schedule=constant", "train.steps=8"]
    recorded = steps(training.run(load_recipe("tiny.toml", settings), extension=Poison(3, 4, 6)))
    assert [record["nonfinite"] for record in recorded] == [0, 0, 1, 2, 2, 3, 3, 3]
    assert recorded[-1]["skipped"] == 0
    assert [record["grad_norm"] is None for record in recorded] == [step in (3, 4, 6) for step in range(1, 9)]
    assert all(math.isfinite(record["loss"]) for record in recorded)
    assert recorded[-1]["loss"] < recorded[0]["loss"]


def test_skipped_steps_move_no_weight(in_workplace):
    settings = ["log.every=1", "eval.every=1", "checkpoint.every=0", "train.steps=4", "optim.schedule=constant"]
    run = training.run(load_recipe("tiny.toml", settings), extension=Poison(2, 3))
    valid = [record["valid_loss"] for record in run.metrics() if "valid_loss" in record]
    assert valid[1] == valid[2] == valid[3]
    assert valid[0] != valid[1] != valid[4]


def test_too_many_in_a_row_end_the_run_with_one_clear_fault(in_workplace):
    settings = ["train.nonfinite_limit=2", "checkpoint.every=2", "log.every=1"]
    training.run(load_recipe("tiny.toml", [*settings, "name=enough"]), extension=Poison(3, 4, 6, 7, 10, 11))
    with pytest.raises(
        RuntimeFailure, match="the gradient norm became nan by step 7, and the last 3 steps were skipped"
    ) as fault:
        training.run(load_recipe("tiny.toml", settings), extension=Poison(3, 5, 6, 7, 8, 9))
    assert "step 6 is saved" in str(fault.value)
    assert Run.open("runs/tiny").state == "failed"
    assert Run.open("runs/tiny").metrics()[-1]["step"] <= 7


def test_a_streak_is_remembered_over_a_restart(in_workplace):
    settings = ["train.nonfinite_limit=2", "eval.every=0"]
    training.run(load_recipe("tiny.toml", [*settings, "train.steps=5"]), extension=Poison(4, 5))
    with pytest.raises(RuntimeFailure, match="by step 6, and the last 3"):
        training.run(load_recipe("tiny.toml", settings), extension=Poison(6, 7, 8))


def test_records_stay_json_and_the_report_can_show_them(in_workplace):
    run = training.run(load_recipe("tiny.toml", ["train.steps=3", "log.every=1"]), extension=Poison(2, 3))
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.dumps(json.loads(line), allow_nan=False)
    run.append({"step": 4, "loss": None, "grad_norm": None, "tokens": 4, "tokens_per_second": 1.0})
    assert "Training loss" in report.render(run)
