"""What measurements change in a prediction."""

import json

import pytest

from steelyard.planning.cluster import HOST_OPERATION_US
from steelyard.planning.evidence import Evidence, Factors, layout_key, work_key
from steelyard.planning.measured_ranks import free_cluster, load, phases_of, with_measured_hosts
from steelyard.planning.memory_fit import rooms
from steelyard.planning.predict import Predictor
from tests.planning.machines import cluster, gpt, layout


def placed(tensor: int = 1, **more):
    return layout([("node", 8)], (8,), tensor=tensor, data=8 // tensor, **more)


def phases(machines, tensor: int = 1) -> dict[str, float]:
    """Seconds of compute. Links cost nothing: else communication overlaps with a host that is slower or faster."""
    return phases_of(Predictor(gpt(batch=64), machines), placed(tensor), 0)


def test_factors_scale_each_phase_of_compute():
    machines = free_cluster("a100-80", 8)
    known = machines.with_evidence(Evidence(work={work_key(placed(2), "a100-80"): Factors(2.0, 2.5, 3.0)}))
    one, two = phases(machines, 2), phases(known, 2)
    ratios = {phase: two[phase] / one[phase] for phase in one}
    assert ratios == pytest.approx({"forward": 2.0, "backward": 2.5, "optimizer": 3.0}, rel=0.01)


def test_factors_do_not_change_communication():
    machines = cluster(("a100-80", 1, 8))
    here = layout([("a100-80", 1)], (8,), tensor=2, data=4)
    known = machines.with_evidence(Evidence(work={work_key(here, "a100-80"): Factors(2.0, 2.0, 2.0)}))
    [one], [two] = (Predictor(gpt(batch=64), each).costs(here) for each in (machines, known))
    assert one.layer.exchange > 0
    assert two.layer.exchange == one.layer.exchange
    assert two.layer.forward < 2 * one.layer.forward


def test_other_layouts_get_the_factors_of_the_nearest_one():
    machines = free_cluster("a100-80", 8)
    work = {work_key(placed(1), "a100-80"): Factors(1.5, 1.5), work_key(placed(4), "a100-80"): Factors(3.0, 3.0)}
    known = machines.with_evidence(Evidence(work=work))
    for tensor, factor in ((1, 1.5), (4, 3.0), (8, 3.0)):
        assert phases(known, tensor)["forward"] == pytest.approx(factor * phases(machines, tensor)["forward"], rel=0.01)


def test_a_site_holds_only_for_its_gpu_and_measured_ranks_count_before_it():
    machines = free_cluster("a100-80", 8)
    plain = phases(machines)["forward"]
    other = machines.with_evidence(Evidence(site={"h100": Factors(9.0, 9.0)}))
    assert phases(other)["forward"] == pytest.approx(plain)
    site = machines.with_evidence(Evidence(site={"a100-80": Factors(4.0, 4.0)}))
    assert phases(site)["forward"] == pytest.approx(4 * plain, rel=0.01)
    both = site.with_evidence(Evidence(work={work_key(placed(), "a100-80"): Factors(2.0, 2.0)}))
    assert phases(both)["forward"] == pytest.approx(2 * plain, rel=0.01)


def test_the_peak_of_a_measured_rank_replaces_the_predicted_memory_of_its_layout():
    machines, recipe = free_cluster("a100-80", 8), gpt(batch=64)
    known = machines.with_evidence(Evidence(peaks={(layout_key(placed(2)), 0): 123_456_789}))
    [room] = rooms(Predictor(recipe, known), placed(2))
    assert room.memory.total == sum(room.memory.by_kind().values()) == 123_456_789
    [other] = rooms(Predictor(recipe, known), placed(4))
    assert other.memory == rooms(Predictor(recipe, machines), placed(4))[0].memory


def test_a_slow_host_costs_small_layers_time_and_large_ones_none():
    def step(recipe, operation: float | None, data: int = 1) -> float:
        machines = free_cluster("h200", 8, host_operation_us=operation)
        return sum(phases_of(Predictor(recipe, machines), placed(8 // data), 0).values())

    small, large = gpt(hidden=256, batch=64), gpt(hidden=8192, heads=64, batch=64, length=8192)
    assert step(small, 16.0, 8) == pytest.approx(2 * step(small, None, 8), rel=0.1)
    assert step(large, 16.0, 8) == pytest.approx(step(large, None, 8), rel=0.01)
    assert step(small, HOST_OPERATION_US) == step(small, None)


def test_a_measured_host_counts_where_the_cluster_file_has_none(tmp_path):
    values = {
        "world": 1, "gpu": "a100-80", "precision": "fp16", "model": {}, "micro_batches": 1, "expert_imbalance": 1.0,
        "layout": {"tensor": 1, "context": 1, "expert": 1, "pipeline": 1, "virtual": 1, "data": 1, "zero": 0,
                   "sequence_parallel": False, "schedule": "1f1b", "recompute": "none", "partition": [8],
                   "micro_batch": 1},
        "ranks": [{"rank": 0, "pipeline_rank": 0, "compute_seconds": 1.0, "peak_bytes": 1,
                   "seconds": {"forward": 1.0, "backward": 1.0, "optimizer": 1.0}}],
    }  # fmt: skip
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(values))
    new.write_text(json.dumps(values | {"host": {"machine": "x86_64", "operation_us": 12.0}}))
    machines = cluster(("a100-80", 1, 8), ("v100-16", 1, 8))
    known = with_measured_hosts([load(old), load(new)], machines)
    assert [nodes.host_operation_us for nodes in known.nodes] == [12.0, None]
    given = cluster(("a100-80", 1, 8), host_operation_us=6.0)
    assert with_measured_hosts([load(new)], given).nodes == given.nodes
