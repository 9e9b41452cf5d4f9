import json
import time
from pathlib import Path

import numpy as np
import pytest

from steelyard.cli.quickstart import FEWEST_STEPS, MOST_STEPS, SECONDS_TO_TRAIN
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run, for_training
from steelyard.training import time_budget
from tests.conftest import kill

SMALL = [
    "model.layers=1", "model.hidden=32", "model.heads=2", "model.vocab=300", "data.sequence_length=16",
    "train.global_batch=1", "train.micro_batch=1", "train.device=cpu", "eval.batches=1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("per_step", "steps"),
    [
        (0.2, 580),  # 120 s are 600 steps, of which the validations take some.
        (0.67, 170),  # Two cores of a Neoverse-N1.
        (3.0, FEWEST_STEPS),
        (1e9, FEWEST_STEPS),
        (0.002, MOST_STEPS),
    ],
)
def test_a_run_is_sized_by_the_time_of_a_step(per_step, steps):
    recipe = load_recipe("quickstart")
    assert time_budget.steps_within(SECONDS_TO_TRAIN, per_step, recipe, FEWEST_STEPS, MOST_STEPS) == steps


def test_measuring_steps_leaves_no_run(in_workplace):
    assert time_budget.seconds_per_step(load_recipe("tiny.toml")) > 0
    assert not Path("runs").exists()


@pytest.mark.slow
def test_an_unfinished_quickstart_keeps_its_steps_and_a_new_one_is_sized(in_workplace):
    Path("quickstart").mkdir()
    text = "\n".join(f"def f{number}(self, x):\n    return x + {number}\n" for number in range(50))
    Path("quickstart/corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(40)))
    for_training(load_recipe("quickstart", [*SMALL, "train.steps=12"]))
    resumed = in_workplace.steelyard("quickstart", *SMALL, "--json")
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads(resumed.stdout)
    assert (result["steps"], result["seconds_per_step_measured"]) == (12, None)

    sized = in_workplace.steelyard("quickstart", *SMALL, "--json")
    assert sized.returncode == 0, sized.stderr
    result = json.loads(sized.stdout)
    assert result["run"] == "runs/quickstart-2"
    assert FEWEST_STEPS <= result["steps"] == Run(Path(result["run"])).recipe().train.steps
    assert result["seconds_per_step_measured"] > 0
    assert f"s per step: training {result['steps']} steps" in sized.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)  # About two minutes of one core; two threads that share their cores take far longer.
def test_the_shortest_quickstart_learns_by_two_nats_though_killed_at_random_moments(workplace):
    words = ["quickstart", f"train.steps={FEWEST_STEPS}", "checkpoint.every=5", "eval.batches=1"]
    random = np.random.RandomState(0)
    for _ in range(6):
        process = workplace.start(*words)
        time.sleep(random.uniform(0.5, 9))
        kill(process)
    done = workplace.steelyard(*words, "--json", timeout=890, env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["valid_loss_before"] - result["valid_loss_after"] >= 2
    assert result["sample"].startswith("def read(self, ")
    assert "<html" in (workplace.path / result["report"]).read_text()[:100]
