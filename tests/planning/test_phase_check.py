"""A run's phases beside the predicted ones, and the calibration of a site from them."""

import json

import pytest

from steelyard.core.recipe import load_recipe
from steelyard.core.run import for_training
from steelyard.planning import phase_check, prediction_check, site_calibration
from steelyard.planning.cluster import load as load_cluster
from steelyard.planning.layout import of_recipe
from steelyard.planning.predict import Predictor

CLUSTER = '[[nodes]]\ntype = "laptop"\ncount = 1\ngpu = "cpu"\ngpus = 2\nprice_hour = 0.1\n'


@pytest.fixture
def site(workplace):
    (workplace.path / "cluster.toml").write_text(CLUSTER)
    return workplace


def recorded(site, factors: dict[str, float]):
    """A run whose timeline has the predicted phases times these factors."""
    recipe = load_recipe(site.recipe, ["name=recorded"])
    run = for_training(recipe, site.path / "recorded")
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
    without = json.loads(site.steelyard(*words, "--no-calibration").stdout)["plans"][0]["parts"]
    assert without["compute"] == pytest.approx(before["compute"])
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
