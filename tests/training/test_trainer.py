import math
import signal
import time

import numpy as np
import pytest

from steelyard import training
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run

TIMING = {"tokens_per_second", "seconds", "tflops", "time", "peak_memory", "rank_seconds"}


def curve(run: Run) -> list[dict]:
    """Everything recorded, without what depends on the clock."""
    return [{key: value for key, value in record.items() if key not in TIMING} for record in run.metrics()]


def test_a_run_learns_and_leaves_everything_a_run_folder_has(in_workplace):
    run = training.run(load_recipe("tiny.toml", ["train.steps=60"]))
    valid = [record["valid_loss"] for record in run.metrics() if "valid_loss" in record]
    assert valid[0] == pytest.approx(math.log(97), abs=0.1)
    assert valid[-1] < valid[0] - 1
    assert run.state == "finished"
    names = {path.name for path in run.path.iterdir()}
    assert {"recipe.toml", "run.json", "metrics.jsonl", "logs", "checkpoints"} <= names
    trained = [record for record in run.metrics() if "loss" in record]
    keys = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "seconds"}
    assert all(keys <= record.keys() for record in trained)
    assert trained[-1]["tokens"] == 60 * 4 * 16


def test_the_same_recipe_gives_the_same_losses_to_the_bit(in_workplace):
    first, second = training.run(load_recipe("tiny.toml")), training.run(load_recipe("tiny.toml"))
    assert first.path != second.path
    assert curve(first) == curve(second)


def test_micro_batches_change_nothing_but_rounding(in_workplace):
    whole = training.run(load_recipe("tiny.toml", ["train.micro_batch=4", "name=whole"]))
    parts = training.run(load_recipe("tiny.toml", ["train.micro_batch=1", "name=parts"]))
    for a, b in zip(curve(whole), curve(parts), strict=True):
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-4)


def test_gpt_trains_too_and_bf16_stays_near_fp32(in_workplace):
    gpt = ["model={family='gpt', layers=1, hidden=32, heads=2, vocab=97}"]
    losses = []
    for precision in ("fp32", "bf16"):
        run = training.run(load_recipe("tiny.toml", [*gpt, f"train.precision={precision}", f"name={precision}"]))
        losses.append([record["loss"] for record in run.metrics() if "loss" in record])
    assert losses[0][-1] < losses[0][0]
    assert np.allclose(losses[0], losses[1], rtol=0.02)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_stop_a_run_saves_and_the_same_command_goes_on(workplace, number):
    recipe = ["tiny.toml", "train.steps=3000", "checkpoint.every=0", "eval.every=0"]
    process = workplace.start("train", *recipe)
    metrics = workplace.path / "runs" / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (metrics.exists() and b'"loss"' in metrics.read_bytes()):
        time.sleep(0.02)
    process.send_signal(number)
    _, messages = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "saved step" in messages
    assert "Traceback" not in messages
    run = Run.open(workplace.path / "runs" / "tiny")
    assert run.state == "interrupted"
    saved = int(sorted(run.checkpoints.iterdir())[-1].name.removeprefix("step-"))
    assert saved > 0
    resumed = workplace.steelyard("train", *recipe[:1], f"train.steps={saved + 2}", *recipe[2:])
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed at step {saved}" in resumed.stderr


def test_a_loss_that_is_no_number_ends_the_run_and_says_what_is_saved(in_workplace):
    with pytest.raises(RuntimeFailure, match=r"became (nan|inf)") as fault:
        training.run(load_recipe("tiny.toml", ["optim.learning_rate=1e12", "optim.warmup_steps=0", "optim.clip=0"]))
    assert "saved" in str(fault.value)
    assert Run.open("runs/tiny").state == "failed"


def test_a_run_that_is_further_than_asked_is_left_as_it_is(in_workplace):
    run = training.run(load_recipe("tiny.toml"))
    run.update(state="running")  # as a kill leaves it
    with pytest.raises(UserError, match="already at step 20"):
        training.run(load_recipe("tiny.toml", ["train.steps=5"]))
    assert run.recipe().train.steps == 20
    assert run.state == "killed"


def test_a_refused_second_writer_changes_nothing(in_workplace):
    run = training.run(load_recipe("tiny.toml", ["train.steps=4"]))
    with run.writing(), pytest.raises(UserError, match="is in use by"):
        training.run(load_recipe("tiny.toml", ["train.steps=6"]))
    assert run.recipe().train.steps == 4


def test_without_a_share_for_validation_a_run_says_so_and_named_files_must_be_there(in_workplace, capsys):
    training.run(load_recipe("tiny.toml", ["data.split=100", "train.steps=2"]))
    assert "no validation" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no token file"):
        training.run(load_recipe("tiny.toml", ["data.valid=nowhere", "train.steps=2", "name=other"]))


def test_a_plan_for_many_ranks_is_refused_by_a_single_process(in_workplace):
    with pytest.raises(UserError, match="a multiple of 4 ranks, not on 1"):
        training.run(load_recipe("tiny.toml", ["parallel.tensor=2", "parallel.pipeline=2"]))
    assert not (in_workplace.path / "runs").exists()


def test_documents_are_kept_apart_when_the_recipe_asks(in_workplace):
    apart = ["data.mask_documents=true", "data.reset_positions=true", "data.end_of_document=0"]
    plain = training.run(load_recipe("tiny.toml", ["name=plain"]))
    masked = training.run(load_recipe("tiny.toml", [*apart, "name=masked"]))
    assert curve(plain)[0] != curve(masked)[0]
    with pytest.raises(UserError, match=r"data\.end_of_document"):
        training.run(load_recipe("tiny.toml", ["data.mask_documents=true", "name=unknown"]))
