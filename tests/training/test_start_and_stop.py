"""Where a run begins, where it goes on, and what makes it stop in between."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest

from steelyard import training
from steelyard.core.errors import Interrupted, UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
from steelyard.training.extension import Extension
from steelyard.training.validation_loss import parts_of
from tests.training.test_trainer import curve

QUICK = ["train.steps=6", "eval.every=0", "log.every=1", "optim.decay_steps=12"]


class Signalled(Extension):
    """Sends this process a signal during a step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def loss(self, stage):
        self.step -= 1
        if self.step == 0:
            os.kill(os.getpid(), self.number)
        return None


class SignalledInValidation(Extension):
    """Sends this process a signal during a part of a validation, and counts the parts."""

    def __init__(self, number: int, part: int) -> None:
        self.number, self.part, self.parts = number, part, 0

    def weigh(self, engine, batch):
        if not engine.parallel_model.model.training:
            self.parts += 1
            if self.parts == self.part:
                os.kill(os.getpid(), self.number)
        return batch, None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("hours", [[], ["train.max_hours=1"]])
def test_a_signal_ends_the_run_after_its_step_and_saves_it(in_workplace, number, hours):
    before = signal.getsignal(number)
    settings = [*QUICK, "checkpoint.every=0", *hours]
    for step in (1, 3):
        with pytest.raises(Interrupted, match=f"saved step {step if step == 1 else 4} of 6"):
            training.run(load_recipe("tiny.toml", settings), extension=Signalled(number, step))
        assert Run.open("runs/tiny").state == "interrupted"
    assert signal.getsignal(number) == before
    resumed = training.run(load_recipe("tiny.toml", settings))
    whole = training.run(load_recipe("tiny.toml", [*settings, "name=whole"]))
    assert curve(resumed) == curve(whole)


def test_a_signal_in_the_last_step_leaves_only_the_validation_for_the_next_start(in_workplace):
    with pytest.raises(Interrupted, match="saved step 6 of 6"):
        training.run(load_recipe("tiny.toml", QUICK), extension=Signalled(signal.SIGTERM, 6))
    run = training.run(load_recipe("tiny.toml", QUICK))
    assert run.state == "finished"
    assert curve(run) == curve(training.run(load_recipe("tiny.toml", [*QUICK, "name=whole"])))


@pytest.mark.parametrize(
    ("number", "part", "message"),
    [
        (signal.SIGTERM, 2, "stopped at step 0"),
        (signal.SIGUSR1, 6, "saved step 3"),
        (signal.SIGINT, 10, "saved step 6"),
    ],
)
def test_a_signal_ends_a_validation_before_its_next_batch_and_the_next_start_repeats_it(
    in_workplace, capsys, number, part, message
):
    # Three validations of four parts: two batches of four samples, two samples at a time.
    settings = [*QUICK, "train.micro_batch=1", "eval.every=3"]
    extension = SignalledInValidation(number, part)
    with pytest.raises(Interrupted, match=f"{message} of 6"):
        training.run(load_recipe("tiny.toml", settings), extension=extension)
    assert extension.parts == part
    said = capsys.readouterr().err
    assert "stopping after this batch of the validation" in said
    assert "validation stopped" in said
    run = training.run(load_recipe("tiny.toml", settings))
    assert run.state == "finished"
    assert curve(run) == curve(training.run(load_recipe("tiny.toml", [*settings, "name=whole"])))


def test_the_parts_of_a_validation_are_as_many_on_every_rank_and_hold_each_sample_once():
    recipe = load_recipe("gpt2-small", ["train.global_batch=24", "train.micro_batch=2", "eval.batches=3"])
    for stages in (1, 2):
        each = [list(parts_of(recipe, mesh(index, stages))) for index in range(3)]
        assert len({len(parts) for parts in each}) == 1
        samples = [first + i for parts in each for first, number in parts for i in range(number)]
        assert sorted(samples) == list(range(72))


def mesh(data: int, stages: int) -> SimpleNamespace:
    return SimpleNamespace(data=SimpleNamespace(index=data, size=3), pipeline=SimpleNamespace(size=stages))


def test_out_of_time_a_run_stops_cleanly_and_goes_on(in_workplace, capsys):
    settings = [*QUICK, "train.steps=3", "train.max_hours=1e-6"]
    states = [training.run(load_recipe("tiny.toml", settings)).state for _ in range(3)]
    assert states == ["stopped", "stopped", "finished"]
    assert "1e-06 hours have passed: saved step 2 of 3; the same command resumes" in capsys.readouterr().err
    whole = training.run(load_recipe("tiny.toml", [*settings[:-1], "name=whole"]))
    assert curve(Run.open("runs/tiny")) == curve(whole)


def test_out_of_time_is_no_failure_of_the_command(workplace):
    stopped = workplace.steelyard("train", "tiny.toml", "train.max_hours=1e-6", "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert (workplace.path / "runs" / "tiny" / "checkpoints" / "step-00000001").is_dir()


def test_never_begins_anew_and_auto_goes_on(in_workplace):
    first = training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=3"]))
    again = training.run(load_recipe("tiny.toml", QUICK), resume="never")
    assert again.path != first.path
    assert len(first.metrics()) < len(again.metrics())
    on = training.run(load_recipe("tiny.toml", QUICK))
    assert on.path == first.path
    assert curve(on)[1:4] == curve(again)[1:4]
    assert on.metrics()[-1]["step"] == 6


@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_a_named_checkpoint_is_where_a_new_run_begins(in_workplace, capsys, what):
    source = training.run(load_recipe("tiny.toml", [*QUICK, "name=source", "train.steps=3"]))
    path = source.path if what == "run" else source.checkpoints / "step-00000003"
    run = training.run(load_recipe("tiny.toml", QUICK), resume=str(path))
    assert f"resumed at step 3 from {source.checkpoints / 'step-00000003'}" in capsys.readouterr().err
    assert [record["step"] for record in run.metrics() if "loss" in record] == [4, 5, 6]
    whole = training.run(load_recipe("tiny.toml", [*QUICK, "name=whole"]))
    assert curve(run) == [record for record in curve(whole) if record["step"] > 3]
    with pytest.raises(UserError, match="neither a checkpoint nor a run folder"):
        training.run(load_recipe("tiny.toml", [*QUICK, "name=other"]), resume="nowhere")


def test_weights_of_another_run_are_a_fresh_start_that_an_own_checkpoint_outdoes(in_workplace, capsys):
    source = training.run(load_recipe("tiny.toml", ["name=source", "eval.every=0"]))
    learned = source.metrics()[-1]["valid_loss"]
    settings = [*QUICK, f"train.init_from={source.path}"]
    run = training.run(load_recipe("tiny.toml", [*settings, "train.steps=3"]))
    first, *trained = run.metrics()
    assert (first["step"], first["valid_loss"]) == (0, learned)
    assert (trained[0]["step"], trained[0]["samples"]) == (1, 4)
    assert trained[0]["learning_rate"] == pytest.approx(1e-2 / 2)
    shutil.rmtree(source.path)  # Going on needs it no more.
    capsys.readouterr()
    run = training.run(load_recipe("tiny.toml", settings))
    assert "resumed at step 3" in capsys.readouterr().err
    assert [record["step"] for record in run.metrics() if "loss" in record] == list(range(1, 7))


def test_weights_that_do_not_fit_are_refused_by_name(in_workplace):
    source = training.run(load_recipe("tiny.toml", ["name=source", "train.steps=1"]))
    with pytest.raises(UserError, match=r"model\.layers\.0\..*: \(.*\) in the checkpoint, \(.*\) expected"):
        training.run(load_recipe("tiny.toml", [f"train.init_from={source.path}", "model.hidden=64", "name=other"]))


def test_rates_and_length_may_be_given_in_any_unit(in_workplace):
    text = in_workplace.recipe.read_text().replace("steps = 20\n", "").replace("warmup_steps = 2\n", "")
    in_workplace.recipe.write_text(text)
    curves = []
    for unit, size in (("steps", 1), ("samples", 4), ("tokens", 64)):
        lengths = [f"train.{unit}={8 * size}", f"optim.warmup_{unit}={3 * size}", f"optim.decay_{unit}={7 * size}"]
        curves.append(curve(training.run(load_recipe("tiny.toml", [*lengths, f"name={unit}", "log.every=1"]))))
    assert len(curves[0]) == 10
    for other in curves[1:]:
        for ours, theirs in zip(curves[0], other, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
