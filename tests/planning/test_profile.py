"""Measured layers take the place of reckoned ones."""

import json
import multiprocessing
import time
from dataclasses import replace

import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe, to_toml
from steelyard.planning import measured_layers as profiles
from steelyard.planning.compute import Work
from steelyard.planning.predict import Predictor
from steelyard.planning.software import STEELYARD
from steelyard.training import bandwidth_probe
from steelyard.training.layer_profile import measure, shard_layer
from tests.planning.machines import cluster, layout


@pytest.fixture
def recipe(in_workplace):
    return load_recipe(in_workplace.recipe)


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


def test_a_slow_machine_measures_the_smallest_micro_batch_and_names_what_it_left_out(recipe, capsys):
    found = measure(recipe, [1], [2, 1, 4], with_links=True, budget=0.0)
    assert [(one["tensor"], one["micro_batch"]) for one in found["layers"]] == [(1, 1)]
    left_out = ["tensor 1 x micro-batch 2", "tensor 1 x micro-batch 4", "the link between two ranks"]
    assert found["left_out"] == left_out
    assert ", ".join(left_out) in capsys.readouterr().err
    assert profiles.Profile.model_validate(found).left_out == left_out


def test_the_time_limit_counts_from_the_start_of_the_command(recipe):
    found = measure(recipe, [1], [1, 2], budget=50.0, began=time.monotonic() - 60)
    assert found["left_out"] == ["tensor 1 x micro-batch 2"]


def test_a_layer_whose_first_round_does_not_fit_into_the_time_is_not_begun(recipe, monkeypatch):
    begun = []

    def slow(_recipe, _device, size):
        begun.append(size)
        while True:
            yield 50.0, 50.0  # Seconds of a round with micro-batch 1, and at least that with 4.

    monkeypatch.setattr("steelyard.training.layer_profile._rounds", slow)
    found = measure(recipe, [1, 2], [1, 4], budget=200.0)
    assert begun == [(1, 1), (2, 1)]
    assert found["left_out"] == ["tensor 1 x micro-batch 4", "tensor 2 x micro-batch 4"]


def test_processes_that_time_a_link_for_too_long_are_ended():
    before = set(multiprocessing.active_children())
    assert bandwidth_probe.measure(torch.device("cpu"), 0.3) is None
    assert set(multiprocessing.active_children()) <= before


def test_measurements_show_their_progress_and_the_time_left(recipe, capsys, monkeypatch):
    monkeypatch.setattr("steelyard.core.console.SECONDS_BETWEEN_LINES", 0.0)
    measure(recipe, [1], [1])
    lines = capsys.readouterr().err.splitlines()
    for task in ("measuring rates", "measuring layers"):
        assert any(line.startswith(f"{task} ") and " left" in line for line in lines)


def test_gpts_layers_are_measured_with_the_widths_of_a_tensor_rank(in_workplace):
    recipe = load_recipe(in_workplace.recipe, ["model={family='gpt', layers=2, hidden=32, heads=8, vocab=97}"])
    sizes = {name: param.shape for name, param in shard_layer(recipe.model.blocks.layers[0], 4).params().items()}
    assert sizes["attention.query.weight"] == sizes["attention.value.weight"] == (8, 32)
    assert (sizes["attention.output.weight"], sizes["mlp.up.weight"]) == ((32, 8), (32, 32))
    assert [one["tensor"] for one in measure(recipe, [1, 4], [1])["layers"]] == [1, 4]
    with pytest.raises(UserError, match=r"model\.heads = 8, .* model\.ffn = 128 is not divisible by 3"):
        measure(recipe, [3], [1])


def test_measured_rates_and_links_take_the_catalogues_place(recipe):
    found = measure(recipe, [1], [1])
    rates = {"product_tflops": 0.01, "copy_gbps": 2.0, "link_gbps": 0.5, "link_latency_us": 30.0}
    profile = profiles.Profile.model_validate(found | {"rates": rates})
    machines = cluster(("cpu", 1, 2))
    predictor = Predictor(recipe, machines, profiles=[profile])
    ring = predictor.step(chosen := layout([("cpu", 1)], (2,), data=2)).table.rings[0]
    assert (ring.bandwidth, ring.latency) == (pytest.approx(0.5e9), pytest.approx(30e-6))
    gpu = profile.calibrated(machines.gpu_by_type["cpu"], recipe.train.precision)
    work = Work.of(recipe, gpu, replace(STEELYARD, product_share=1.0), 1, (1, 1, False))
    assert (work.rate, work.bandwidth) == (pytest.approx(0.01e12), pytest.approx(2e9))
    reported = cluster(("cpu", 1, 2), intra_GBps=7.0)  # What the file says is believed.
    assert Predictor(recipe, reported, profiles=[profile]).step(chosen).table.rings[0].bandwidth > 1e9


@pytest.mark.slow
def test_two_ranks_of_this_machine_time_the_link_between_them(workplace):
    words = ("plan", "profile", "--model", "tiny.toml", "--micro-batch", "1", "--json")
    answer = workplace.steelyard(*words)
    assert answer.returncode == 0, answer.stderr
    rates = json.loads(answer.stdout)["rates"]
    assert 0.01 < rates["link_gbps"] < 1000
    assert 0 < rates["link_latency_us"] < 1e5
    assert profiles.load(workplace.path / "profile.toml").rates == pytest.approx(rates)


def test_a_profile_of_another_model_or_with_a_mistake_is_refused(recipe, tmp_path):
    path = tmp_path / "profile.toml"
    found = measure(recipe, [1], [1])
    path.write_text(to_toml(found | {"hidden": 64}))
    with pytest.raises(UserError, match="this profile has hidden 64, but the recipe has 32"):
        profiles.refuse_another(profiles.load(path), recipe, path)
    path.write_text(to_toml(found | {"ffn": 7}))
    with pytest.raises(UserError, match="this profile has ffn 7"):
        profiles.refuse_another(profiles.load(path), recipe, path)
    path.write_text(to_toml({key: value for key, value in found.items() if key not in ("family", "ffn", "heads")}))
    profiles.refuse_another(profiles.load(path), recipe, path, cluster(("cpu", 1, 1)))
    with pytest.raises(UserError, match="this profile was measured on cpu, but the cluster has a10, t4"):
        profiles.refuse_another(profiles.load(path), recipe, path, cluster(("t4", 1, 1), ("a10", 1, 1)))
    path.write_text(to_toml(found | {"layers": [{"tensor": 1, "micro_batch": 1, "forward": -1.0, "backward": 1.0}]}))
    with pytest.raises(UserError, match="greater than 0"):
        profiles.load(path)


def test_a_degree_that_does_not_divide_is_refused_before_anything_is_measured(recipe, monkeypatch):
    monkeypatch.setattr("steelyard.training.layer_profile._rounds", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match="is not divisible by 3"):
        measure(recipe, [1, 3], [1])
