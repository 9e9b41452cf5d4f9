"""`parallel.recompute = "auto"`."""

from __future__ import annotations

import pytest

from steelyard.core.recipe import load_recipe
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import of_recipe
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.sizes.least_recompute import with_least_recompute
from steelyard.sizes.memory import RESERVED, memory_of
from steelyard.training.dry_run import as_text, dry_run

ORDER = ["none", "selective", *range(1, 16), "full"]


def needs(recompute: str | int) -> int:
    recipe = load_recipe("llama3.2-1b", ["train.micro_batch=4", f"parallel.recompute={recompute}"])
    return max(memory.total for memory in memory_of(recipe, 1))


@pytest.mark.parametrize("gib", [20, 26, 30, 34, 38, 42, 46, 50, 60, 80])
def test_auto_is_the_first_setting_that_fits(gib):
    recipe = load_recipe("llama3.2-1b", ["train.micro_batch=4", "parallel.recompute=auto"])
    chosen = with_least_recompute(recipe, 1, gib * GIB).parallel.recompute
    assert all(needs(before) > gib * GIB for before in ORDER[: ORDER.index(chosen)])
    assert chosen == "full" or needs(chosen) <= gib * GIB


def test_small_and_large_devices_differ():
    recipe = load_recipe("llama3.2-1b", ["train.micro_batch=4", "parallel.recompute=auto"])
    chosen = {with_least_recompute(recipe, 1, size * GIB).parallel.recompute for size in range(20, 80, 2)}
    assert {"none", "full"} < chosen
    assert any(isinstance(each, int) for each in chosen)


def test_other_settings_and_unknown_devices():
    full = load_recipe("llama3.2-1b", ["parallel.recompute=full"])
    assert with_least_recompute(full, 1, 10**15) is full
    auto = load_recipe("llama3.2-1b", ["parallel.recompute=auto"])
    assert with_least_recompute(auto, 1, None).parallel.recompute == "none"


def test_dry_runs_and_plans_resolve_it():
    recipe = load_recipe("llama3.2-1b", ["train.micro_batch=4", "parallel.recompute=auto"])
    expected = with_least_recompute(recipe, 1, 40 * GIB - RESERVED).parallel.recompute
    assert expected not in ("none", "auto")
    assert f"recompute {expected}" in as_text(dry_run(recipe, 1, "40GiB"))
    cluster = Cluster.model_validate({"nodes": [{"type": "a", "count": 1, "gpu": "a100-40", "gpus": 1}]})
    assert of_recipe(recipe, cluster).recompute == expected
