"""A run's phases beside the predicted ones, and the calibration of a site from them."""

import json
import shutil

import pytest

from steelyard.core.recipe import load_recipe
from steelyard.core.run import for_training
from steelyard.planning import measured_ranks, phase_check, prediction_check, site_calibration
from steelyard.planning.cluster import load as load_cluster
from steelyard.planning.layout import of_recipe
from steelyard.planning.predict import Predictor

CLUSTER = '[[nodes]]\ntype = "laptop"\ncount = 1\ngpu = "cpu"\ngpus = 2\nprice_hour = 0.1\n'


@pytest.fixture
def site(workplace):
    (workplace.path / "cluster.toml").write_text(CLUSTER)
    return workplace


def recorded(site, factors: dict[str, float], name: str = "recorded"):
    """A run whose timeline has the predicted phases times these factors."""
    recipe = load_recipe(site.recipe, [f"name={name}"])
    run = for_training(recipe, site.path / name)
    run.update(world_size=1, device="cpu")
    cluster = load_cluster(site.path / "cluster.toml")
    settings = recipe.settings()
    settings["parallel"] = settings.get("parallel", {}) | {"data": 1}
    fixed = type(recipe).model_validate(settings)
    layout = of_recipe(fixed, cluster)
    predicted = phase_check.predicted_phases(Predictor.of_layout(fixed, cluster, layout).step(layout), layout.partition)
    spans = {"data": "data", "forward": "forward", "backward": "backward", "exposed communication": "gradients",
             "optimizer": "optimizer"}  # fmt: skip
    at, lines, total = 10**18, [], 0.0
    for phase, name in spans.items():
        length = round(1e9 * predicted[phase] * factors.get(phase, 1.0))
        total += length / 1e9
        entry = {"step": 1, "name": name, "stage": 0, "micro_batch": 0, "start_ns": at, "end_ns": at + length}
        lines.append(json.dumps(entry))
        at += length
    (run.path / "timeline").mkdir()
    (run.path / "timeline" / "rank-00000.jsonl").write_text("\n".join(lines) + "\n")
    run.append({"step": 1, "loss": 1.0, "seconds": total})
    return run.path, cluster


def test_the_term_that_is_off_is_named_and_calibrated_away(site):
    path, cluster = recorded(site, {"backward": 3.0, "forward": 1.1})
    compared = prediction_check.compare(path, cluster)
    result = prediction_check.as_result(compared)
    assert result["worst"] == "backward"
    assert "the term that is off most is backward" in prediction_check.as_text(compared)
    assert sum(part["predicted"] for part in result["parts"].values()) == pytest.approx(result["predicted_seconds"])
    assert compared.error < -0.3
    assert compared.calibration.backward == pytest.approx(3.0, rel=1e-3)
    assert compared.calibration.error_after == pytest.approx(0, abs=0.01)


def test_a_prediction_that_is_right_needs_no_factor(site):
    compared = prediction_check.compare(*recorded(site, {}))
    assert compared.calibration.forward == pytest.approx(1, abs=1e-3)
    assert compared.error == pytest.approx(0, abs=1e-3)


def test_the_next_plan_uses_a_stored_calibration(site):
    path, _ = recorded(site, {"forward": 2.0, "backward": 2.0})
    words = (
        "plan",
        "--model",
        "tiny.toml",
        "--cluster",
        "cluster.toml",
        "--given",
        "--json",
        "--set",
        "parallel.data=1",
    )
    before = json.loads(site.steelyard(*words).stdout)["plans"][0]["parts"]
    stored = site.steelyard("plan", "--check", path.name, "--cluster", "cluster.toml", "--store")
    assert stored.returncode == 0, stored.stderr
    assert "cluster.calibration.toml" in stored.stderr
    after = site.steelyard(*words)
    assert "calibrated with 1 run" in after.stderr
    assert json.loads(after.stdout)["plans"][0]["parts"]["compute"] == pytest.approx(2 * before["compute"], rel=0.01)
    used = json.loads(after.stdout)
    assert (used["software"], used["calibration"]) == ("steelyard", "calibrated with 1 run: cluster.calibration.toml")
    without = json.loads(site.steelyard(*words, "--no-calibration").stdout)
    assert without["calibration"] is None
    assert without["plans"][0]["parts"]["compute"] == pytest.approx(before["compute"])
    other = json.loads(site.steelyard(*words, "--software", "megatron").stdout)
    assert other["calibration"].startswith("not calibrated with 1 run of steelyard")
    site.steelyard("plan", "--check", path.name, "--cluster", "cluster.toml", "--store")
    assert len(site_calibration.load(site.path / "cluster.calibration.toml").runs) == 1


def test_a_run_without_a_timeline_cannot_calibrate(site):
    path, _ = recorded(site, {})
    (path / "timeline" / "rank-00000.jsonl").unlink()
    refused = site.steelyard("plan", "--check", path.name, "--cluster", "cluster.toml", "--store")
    assert refused.returncode == 2
    assert "log.timeline" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("parallel.pipeline=2", "parallel.partition=1-1"), ("parallel.data=2",)])
def test_a_real_run_is_checked_phase_by_phase_and_calibrates_its_site(site, layout):
    words = (
        *layout,
        "train.global_batch=8",
        "train.micro_batch=1",
        "train.steps=8",
        "log.timeline=[4, 8]",
        "log.every=1",
    )
    trained = site.steelyard("train", "tiny.toml", *words, "--nproc", "2", "--run", "real")
    assert trained.returncode == 0, trained.stderr
    checked = site.steelyard("plan", "--check", "real", "--cluster", "cluster.toml", "--json")
    assert checked.returncode == 0, checked.stderr
    compared = json.loads(checked.stdout)
    assert list(compared["parts"]) == list(phase_check.PHASES)
    assert all(part["measured"] >= 0 for part in compared["parts"].values())
    assert compared["parts"]["forward"]["measured"] > 0
    if "parallel.pipeline=2" in layout:
        assert compared["parts"]["bubble"]["measured"] > 0
    assert compared["worst"] in phase_check.PHASES
    calibration = compared["calibration"]
    assert abs(calibration["error_after"]) < abs(calibration["error_before"])


def test_errors_after_are_those_of_the_calibration_with_all_stored_runs(site, capfd):
    path, cluster = recorded(site, {"forward": 2.0, "backward": 2.0})
    other, _ = recorded(site, {"forward": 8.0, "backward": 8.0}, "other")
    file = site.path / "cluster.toml"
    prediction_check.store(prediction_check.compare(path, cluster), cluster, file)
    stored = site_calibration.load(site.path / "cluster.calibration.toml").runs
    assert stored[0].error_after == pytest.approx(0, abs=0.01)
    compared = prediction_check.compare(other, cluster, stored=stored)
    assert compared.alone == pytest.approx(0, abs=0.01)
    assert "calibrated with this run and 1 stored (--store)" in prediction_check.as_text(compared)
    one, two = prediction_check.store(compared, cluster, file)
    # Their factors combine to 4: one run is predicted twice as long as measured, the other half as long.
    assert one.error_after > 0.8
    assert two.error_after < -0.4
    assert two.error_after == pytest.approx(compared.calibration.error_after)
    said = capfd.readouterr().err
    for run, folder in ((one, path), (two, other)):
        again = prediction_check.compare(folder, site_calibration.applied(cluster, file))
        assert again.error == pytest.approx(run.error_after)
        assert f"after {100 * run.error_after:+.1f}%" in said
    shutil.rmtree(path)
    one, two = prediction_check.store(compared, cluster, file)
    assert one.error_after is None
    assert "its folder is gone" in capfd.readouterr().err


def measured_file(site, factor: float) -> None:
    """Write measured.json: one rank of tiny.toml whose compute takes `factor` times as long as predicted."""
    recipe = load_recipe(site.recipe)
    phases = measured_ranks.predicted_phases(recipe, measured_ranks.free_cluster("cpu", 1), 0, 1.0)
    seconds = {name: factor * value for name, value in phases.items()}
    shape = {"tensor": 1, "context": 1, "expert": 1, "pipeline": 1, "virtual": 1, "data": 1, "zero": 0,
             "sequence_parallel": False, "schedule": "1f1b", "recompute": "none", "partition": [recipe.model.layers],
             "micro_batch": recipe.train.micro_batch}  # fmt: skip
    rank = {
        "rank": 0,
        "pipeline_rank": 0,
        "seconds": seconds,
        "compute_seconds": sum(seconds.values()),
        "peak_bytes": 1,
    }
    values = {"world": 1, "gpu": "cpu", "precision": recipe.train.precision, "model": measured_ranks.identity(recipe),
              "micro_batches": recipe.train.global_batch // recipe.train.micro_batch, "layout": shape,
              "ranks": [rank]}  # fmt: skip
    (site.path / "measured.json").write_text(json.dumps(values))


def test_a_run_is_checked_against_a_prediction_with_measured_ranks(site):
    path, cluster = recorded(site, {"forward": 3.0, "backward": 3.0})
    measured_file(site, 3.0)
    words = ("plan", "--check", path.name, "--cluster", "cluster.toml", "--json", "--measured", "measured.json")
    known = site.steelyard(*words)
    assert prediction_check.compare(path, cluster).error < -0.5
    assert abs(json.loads(known.stdout)["error"]) < 0.1, known.stderr
    refused = site.steelyard(*words, "--store")
    assert refused.returncode == 2
    assert "remove --profile and --measured" in " ".join(refused.stderr.split())
    assert not (site.path / "cluster.calibration.toml").exists()


def test_ranks_of_steelyard_are_refused_for_another_program(site):
    measured_file(site, 3.0)
    words = ("plan", "--model", "tiny.toml", "--cluster", "cluster.toml", "--measured", "measured.json")
    refused = site.steelyard(*words, "--software", "megatron-deepspeed")
    assert refused.returncode == 2
    assert "these ranks ran Steelyard, but the plan is for megatron-deepspeed" in " ".join(refused.stderr.split())
