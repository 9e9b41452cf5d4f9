"""`steelyard tune` on real training runs, and its report."""

import json
import re
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load, to_toml
from steelyard.tune import history, kept, outcome, search
from steelyard.tune.prior import Prior
from steelyard.tune.spec import load as load_tune

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
    recipe = load(workplace.path / "studies/rates/best.toml")
    assert recipe.optim.learning_rate == BEST_RATE
    assert recipe.train.steps == 20
    assert recipe.checkpoint.at_end
    _, study = kept.opened(workplace.path / "studies/rates")
    ended = [history.result_of(trial) for trial in study.get_trials()]
    assert ended.count(outcome.FINISHED) >= 3
    assert not list((workplace.path / "studies/rates/trials").glob("*/run/checkpoints/*"))
    workplace.recipe.unlink()  # A study tells its story by itself.
    told = workplace.steelyard("tune", "report", "studies/rates", "--json")
    assert told.returncode == 0, told.stderr
    page = (workplace.path / "studies/rates/report.html").read_text()
    for title in ("Best settings", "History of valid_loss", "Importance for", "Parallel coordinates", "Trials"):
        assert title in page
    assert "learning_rate = 0.01" in page
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["']?https?:""", page)


def test_the_planner_prunes_what_cannot_run_or_fit_and_orders_the_rest(in_workplace):
    (in_workplace.path / "crowded.toml").write_text(CROWDED)
    (in_workplace.path / "small.toml").write_text(SMALL)
    tune = load_tune("crowded.toml")
    prior, base = Prior(tune), {"train.global_batch": 64, "parallel.tensor": 1}
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
    recipe = load("tiny.toml")
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
    first = Prior(tune).first(tune.searched(), 30)
    assert first[0] == {"train.micro_batch": 1}
    slow, fast = (Prior(tune).of({"train.micro_batch": size}).predicted["seconds"] for size in (4, 1))
    assert slow > 100 * fast
    without = load_tune("profiled.toml", {"overrides": ["train.device=cpu"], "profile": []})
    assert Prior(without).first(tune.searched(), 30)[0] == {"train.micro_batch": 4}


def test_a_profile_of_other_layers_or_devices_is_refused(of_a_cpu):
    done = of_a_cpu.steelyard("tune", "profiled.toml", "train.device=cpu", "model.hidden=64", "model.heads=2")
    assert (done.returncode, "cpu.toml: this profile has hidden" in done.stderr) == (2, True), done.stderr
    (of_a_cpu.path / "small.toml").write_text(SMALL)
    with pytest.raises(UserError, match=r"cpu.toml: this profile is of cpu, and the cluster has mine"):
        search.prepare(load_tune("profiled.toml", {"cluster": "small.toml"}))


def test_nodes_that_a_layout_cannot_fill_are_known_before_anything_is_submitted(in_workplace):
    (in_workplace.path / "jobs.toml").write_text(
        'recipe = "tiny.toml"\nspace.parallel.data = [2, 3, 4]\nlaunch = { on = "slurm", ranks_per_node = 2 }\n'
        'overrides = ["train.global_batch=24", "train.micro_batch=1"]\n'
    )
    prior = Prior(load_tune("jobs.toml"))
    told = {data: prior.of({"parallel.data": data}).why_not for data in (2, 3, 4)}
    assert (told[2], told[4]) == (None, None)
    assert "the plan has 3 ranks, which do not fill nodes of 2" in told[3]


def test_a_space_without_a_point_that_runs_is_the_users_mistake(in_workplace):
    (in_workplace.path / "none.toml").write_text('recipe = "tiny.toml"\nspace.model.heads = [3, 5]\n')
    with pytest.raises(UserError, match=r"no point of the space can run: .*heads"):
        search.search(load_tune("none.toml"), Path("study"))


def test_what_is_no_study_is_refused(workplace):
    done = workplace.steelyard("tune", "report", "nowhere")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: there is no study folder nowhere")
    done = workplace.steelyard("tune", "report", ".")
    assert done.returncode == 2
    assert "is not a study" in done.stderr
