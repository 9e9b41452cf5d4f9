"""Measured layers take the place of reckoned ones."""

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load, to_toml
from steelyard.plan import profile as profiles
from steelyard.plan.predict import Predictor
from steelyard.train.profile import measure
from tests.plan.machines import cluster, layout


@pytest.fixture
def recipe(in_workplace):
    return load(in_workplace.recipe)


def test_a_layer_is_measured_here_and_the_planner_believes_it(recipe, tmp_path):
    found = measure(recipe, [1, 2], [1, 2])
    assert [(one["tensor"], one["micro_batch"]) for one in found["layers"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert found["gpu"] == "cpu"
    assert {"steelyard", "torch", "python"} <= found["versions"].keys()
    for one in found["layers"]:
        one["forward"], one["backward"] = 0.25, 0.5  # A layer so slow that nothing else counts.
    path = tmp_path / "profile.toml"
    path.write_text(to_toml(found))
    profile = profiles.load(path)
    profiles.refuse_another(profile, recipe, path)
    machines = cluster(("cpu", 1, 1))
    chosen = layout([("cpu", 1)], (2,), micro_batch=2)
    parts = Predictor(recipe, machines, profiles=[profile]).parts(chosen)
    assert parts.compute == pytest.approx(2 * 2 * 0.75, rel=0.02)  # Two micro-batches through two layers.
    assert Predictor(recipe, machines).parts(chosen).compute < 0.1


def test_a_profile_of_another_model_or_with_a_mistake_is_refused(recipe, tmp_path):
    path = tmp_path / "profile.toml"
    found = measure(recipe, [1], [1])
    path.write_text(to_toml(found | {"hidden": 64}))
    with pytest.raises(UserError, match="this profile has hidden 64, and the recipe 32"):
        profiles.refuse_another(profiles.load(path), recipe, path)
    path.write_text(to_toml(found | {"ffn": 7}))
    with pytest.raises(UserError, match="this profile has ffn 7"):
        profiles.refuse_another(profiles.load(path), recipe, path)
    path.write_text(to_toml({key: value for key, value in found.items() if key not in ("family", "ffn", "heads")}))
    profiles.refuse_another(profiles.load(path), recipe, path, cluster(("cpu", 1, 1)))
    with pytest.raises(UserError, match="this profile is of cpu, and the cluster has a10, t4"):
        profiles.refuse_another(profiles.load(path), recipe, path, cluster(("t4", 1, 1), ("a10", 1, 1)))
    path.write_text(to_toml(found | {"layers": [{"tensor": 1, "micro_batch": 1, "forward": -1.0, "backward": 1.0}]}))
    with pytest.raises(UserError, match="greater than 0"):
        profiles.load(path)
