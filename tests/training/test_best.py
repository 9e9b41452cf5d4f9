"""The best step of a run, and an end that comes when there is no better one."""

import json

from steelyard import checkpoint, training
from steelyard.core.recipe import load_recipe


def test_the_best_step_is_kept_and_a_run_that_gets_no_better_ends(in_workplace, capsys):
    words = [
        "optim.learning_rate=0.03",
        "optim.schedule=constant",
        "train.steps=200",
        "eval.every=2",
        "eval.patience=3",
    ]
    words += ["checkpoint.keep_best=true", "checkpoint.every=2", "checkpoint.keep_last=1"]
    run = training.run(load_recipe("tiny.toml", words))
    losses = {record["step"]: record["valid_loss"] for record in run.metrics() if "valid_loss" in record}
    best, last = min(losses, key=losses.get), max(losses)
    assert last == best + 6 < 200
    assert "early stop: the validation loss has not improved in" in capsys.readouterr().err
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [f"step-{best:08d}", f"step-{last:08d}"]
    kept = checkpoint.best(run.checkpoints)
    assert json.loads((kept / checkpoint.STATE).read_text())["valid_loss"] == losses[best]
    assert run.state == "finished"


def test_what_a_run_began_with_is_not_its_best(in_workplace):
    """A rate that only does harm: of the steps taken the least bad one is kept."""
    words = ["optim.learning_rate=0.5", "optim.warmup_steps=0", "optim.schedule=constant", "eval.every=2"]
    run = training.run(
        load_recipe("tiny.toml", [*words, "train.steps=6", "checkpoint.keep_best=true", "checkpoint.every=0"])
    )
    losses = {record["step"]: record["valid_loss"] for record in run.metrics() if "valid_loss" in record}
    first = losses.pop(0)
    assert first < min(losses.values())
    assert checkpoint.best(run.checkpoints).name == f"step-{min(losses, key=losses.get):08d}"


def test_a_validation_that_was_no_number_stops_no_resumed_run(in_workplace):
    words = ["eval.every=2", "checkpoint.every=2"]
    run = training.run(load_recipe("tiny.toml", [*words, "train.steps=4"]), in_workplace.path / "run")
    records = [record | {"valid_loss": None} if "valid_loss" in record else record for record in run.metrics()]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run.update(state="stopped")
    assert training.run(load_recipe("tiny.toml", [*words, "train.steps=6"]), run.path).state == "finished"
