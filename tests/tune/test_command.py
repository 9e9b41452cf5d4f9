"""`steelyard tune` on real training runs, and its report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe, to_toml
from steelyard.launch import submit
from steelyard.tune import outcome, study_folder, submitted_trial, trial_history, worker_loop
from steelyard.tune.candidate import recipe_at
from steelyard.tune.defaults import tune_for
from steelyard.tune.planner_prior import PlannerPrior
from steelyard.tune.spec import load as load_tune
from tests import preloaded
from tests.conftest import kill
from tests.launch.test_job_tags import PROGRAMS
from tests.tune.test_study import wait_for

RATES = """
recipe = "tiny.toml"
overrides = ["checkpoint.every=0"]

[space]
optim.learning_rate = { choice = [1e-4, 1e-3, 1e-2, 1e-1, 1.0] }

[[objectives]]
metric = "valid_loss"

[budget]
trials = 5

[trial]
steps = 20
"""
BEST_RATE = 1e-2  # The lowest validation loss of all five, by far.
CROWDED = """
recipe = "tiny.toml"
cluster = "small.toml"
nproc = 2
constraints = ["train.micro_batch <= 32"]
[space]
train.micro_batch = [1, 4, 64]
train.global_batch = [64]
data.sequence_length = [16, 16384]
parallel.tensor = [1, 2, 3]
"""
SMALL = """
[[nodes]]
type = "small"
count = 1
gpu = "mine"
gpus = 2
[[gpus]]
name = "mine"
memory_gib = 0.5
fp32 = 1.0
bandwidth_gb = 100.0
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_known_best_learning_rate_is_found_by_real_training_runs(workplace):
    (workplace.path / "rates.toml").write_text(RATES)
    found = workplace.steelyard("tune", "rates.toml", "--json", "--workers", "2", timeout=600)
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert summary["best"][0]["settings"] == {"optim.learning_rate": BEST_RATE}
    recipe = load_recipe(workplace.path / "studies/rates/best.toml")
    assert recipe.optim.learning_rate == BEST_RATE
    assert recipe.train.steps == 20
    assert recipe.checkpoint.at_end
    _, study = study_folder.opened(workplace.path / "studies/rates")
    ended = [trial_history.result_of(trial) for trial in study.get_trials()]
    assert ended.count(outcome.FINISHED) >= 3
    assert not list((workplace.path / "studies/rates/trials").glob("*/run/checkpoints/*"))
    workplace.recipe.unlink()  # A study tells its story by itself.
    reported = workplace.steelyard("tune", "report", "studies/rates", "--json")
    assert reported.returncode == 0, reported.stderr
    page = (workplace.path / "studies/rates/report.html").read_text()
    for title in ("Best settings", "History of valid_loss", "Importance for", "Parallel coordinates", "Trials"):
        assert title in page
    assert "learning_rate = 0.01" in page
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["']?https?:""", page)


def test_the_planner_prunes_what_cannot_run_or_fit_and_orders_the_rest(in_workplace):
    (in_workplace.path / "crowded.toml").write_text(CROWDED)
    (in_workplace.path / "small.toml").write_text(SMALL)
    tune = load_tune("crowded.toml")
    prior, base = PlannerPrior(tune), {"train.global_batch": 64, "parallel.tensor": 1}
    fits = prior.of(base | {"train.micro_batch": 4, "data.sequence_length": 16})
    assert fits.why_not is None
    assert fits.predicted["tokens_per_second"] == pytest.approx(64 * 16 / fits.predicted["seconds"])
    too_large = prior.of(base | {"train.micro_batch": 4, "data.sequence_length": 16384})
    assert "mine has" in too_large.why_not
    odd = prior.of(base | {"train.micro_batch": 1, "data.sequence_length": 16, "parallel.tensor": 3})
    assert "3" in odd.why_not
    first = prior.first(tune.searched(), 30)
    speeds = [prior.of(point).predicted["tokens_per_second"] for point in first]
    assert len(first) == 6
    assert speeds == sorted(speeds, reverse=True)


@pytest.fixture
def of_a_cpu(in_workplace):
    """A tune file with a profile of tiny.toml's layer, which is a thousand times slower at one of two micro-batches."""
    recipe = load_recipe("tiny.toml")
    model, rows = recipe.model, [(1, 1e-3), (4, 4.0)]
    known = {"gpu": "cpu", "device": "cpu", "precision": recipe.train.precision, "hidden": model.hidden}
    known |= {"sequence_length": recipe.data.sequence_length, "date": "2026-01-01", "versions": {}, "host": {}}
    layers = [{"tensor": 1, "micro_batch": m, "forward": s, "backward": 2 * s} for m, s in rows]
    (in_workplace.path / "cpu.toml").write_text(to_toml(known | {"rates": {}, "layers": layers}))
    text = 'recipe = "tiny.toml"\nprofile = "cpu.toml"\nspace.train.micro_batch = [1, 4]\n'
    (in_workplace.path / "profiled.toml").write_text(text)
    return in_workplace


def test_the_planner_orders_trials_by_what_was_measured(of_a_cpu):
    tune = load_tune("profiled.toml", {"overrides": ["train.device=cpu"]})
    first = PlannerPrior(tune).first(tune.searched(), 30)
    assert first[0] == {"train.micro_batch": 1}
    slow, fast = (PlannerPrior(tune).of({"train.micro_batch": size}).predicted["seconds"] for size in (4, 1))
    assert slow > 100 * fast
    without = load_tune("profiled.toml", {"overrides": ["train.device=cpu"], "profile": []})
    assert PlannerPrior(without).first(tune.searched(), 30)[0] == {"train.micro_batch": 4}


def test_a_profile_of_other_layers_or_devices_is_refused(of_a_cpu):
    done = of_a_cpu.steelyard("tune", "profiled.toml", "train.device=cpu", "model.hidden=64", "model.heads=2")
    assert (done.returncode, "cpu.toml: this profile has hidden" in done.stderr) == (2, True), done.stderr
    (of_a_cpu.path / "small.toml").write_text(SMALL)
    with pytest.raises(UserError, match=r"cpu.toml: this profile was measured on cpu, but the cluster has mine"):
        worker_loop.prepare(load_tune("profiled.toml", {"cluster": "small.toml"}))


def test_nodes_that_a_layout_cannot_fill_are_known_before_anything_is_submitted(in_workplace):
    (in_workplace.path / "jobs.toml").write_text(
        'recipe = "tiny.toml"\nspace.parallel.data = [2, 3, 4]\nlaunch = { on = "slurm", ranks_per_node = 2 }\n'
        'overrides = ["train.global_batch=24", "train.micro_batch=1"]\n'
    )
    prior = PlannerPrior(load_tune("jobs.toml"))
    reported = {data: prior.of({"parallel.data": data}).why_not for data in (2, 3, 4)}
    assert (reported[2], reported[4]) == (None, None)
    assert "the plan has 3 ranks, which is not a multiple of 2 ranks per node" in reported[3]


TWO_TYPES = "".join(
    f"""
[[nodes]]
type = "{type_}"
count = {count}
gpu = "{type_}"
gpus = 2
partition = "{type_}"
gres = "gpu:{type_}:2"
"""
    for type_, count in (("a10", 2), ("a40", 4))
)


def test_a_choice_of_lists_is_written_as_strings(in_workplace):
    text = 'recipe = "tiny.toml"\nspace.optim.betas = ["[0.9, 0.95]", "[0.8, 0.9]"]\n'
    (in_workplace.path / "lists.toml").write_text(text)
    tune = load_tune("lists.toml")
    chosen = [
        recipe_at(tune, {"optim.betas": choice}, is_trial=True).optim.betas
        for choice in tune.space["optim.betas"].choice
    ]
    assert chosen == [[0.9, 0.95], [0.8, 0.9]]


def test_a_trial_of_a_number_of_steps_has_no_other_limit_of_the_recipe(in_workplace):
    text = 'recipe = "tiny.toml"\noverrides = ["train.max_hours=1", "train.tokens=4096"]\ntrial.steps = 3\n'
    (in_workplace.path / "short.toml").write_text(text + "space.optim.learning_rate = [1e-4, 1e-3]\n")
    train = recipe_at(load_tune("short.toml"), {}, is_trial=True).train
    assert (train.steps, train.max_hours, train.tokens) == (3, None, None)


@pytest.mark.parametrize(
    ("ranks", "placement", "nodes"),
    [
        (1, ["a10:1"], [(1, 1)]),
        (4, ["a10:2"], [(2, 2)]),
        (8, ["a40:4"], [(4, 2)]),
        (12, ["a10:2", "a40:4"], [(2, 2), (4, 2)]),
    ],
)
def test_nodes_of_several_types_are_chosen_from_the_cluster_file(in_workplace, ranks, placement, nodes):
    (in_workplace.path / "two.toml").write_text(TWO_TYPES)
    changes = {"launch.on": "slurm", "cluster": "two.toml"}
    tune = tune_for("tiny.toml", ["train.global_batch=24", "train.device=auto"], ranks, changes)
    point = {"train.micro_batch": 1, "parallel.recompute": "none"}
    assert PlannerPrior(tune).of(point).why_not is None
    recipe = recipe_at(tune, point, is_trial=True)
    assert recipe.parallel.placement == placement
    found = submit.groups_of(submitted_trial.request(tune, recipe, Path("run")))
    assert [(group.nodes, group.ranks) for group in found] == nodes


@pytest.mark.slow
def test_jobs_of_slurms_outlive_a_tuner_of_several_workers_that_is_killed(in_workplace):
    """The guide's example: a recipe, a cluster file of two types, two workers; programs of ours stand for Slurm's."""
    place = in_workplace.path
    (place / "two.toml").write_text(TWO_TYPES)
    (place / "queue").mkdir()
    sbatch = 'echo "${@: -2}" >"$QUEUE/$$"; echo $$'  # Two workers may come at once.
    for name, text in (PROGRAMS | {"sbatch": sbatch}).items():
        (place / name).write_text(f"#!/bin/bash\n{text}\n")
        (place / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{place}:{os.environ['PATH']}", "QUEUE": str(place / "queue")}
    words = ["tune", "tiny.toml", "--on", "slurm", "--cluster", "two.toml", "--nproc", "4", "--workers", "2"]
    tuner = preloaded.Popen(
        [sys.executable, "-P", "-m", "steelyard", *words], cwd=place, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(list((place / "queue").iterdir())) == 2)
        trials = study_folder.opened(place / "studies" / "tiny")[1].get_trials()
        owners = [trial.user_attrs["worker"] for trial in trials if trial.state.name == "RUNNING"]
    finally:
        kill(tuner)
    assert len(owners) == 2
    wait_for(lambda: all(trial_history.is_dead(owner) for owner in owners))
    assert not (place / "cancelled").exists()


def test_a_space_without_a_point_that_runs_is_the_users_mistake(in_workplace):
    (in_workplace.path / "none.toml").write_text('recipe = "tiny.toml"\nspace.model.heads = [3, 5]\n')
    with pytest.raises(UserError, match=r"no point of the space can run: .*heads"):
        worker_loop.search(load_tune("none.toml"), Path("study"))


def test_what_is_no_study_is_refused(workplace):
    done = workplace.steelyard("tune", "report", "nowhere")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: there is no study folder nowhere")
    done = workplace.steelyard("tune", "report", ".")
    assert done.returncode == 2
    assert "is not a study" in done.stderr
