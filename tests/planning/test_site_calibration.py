"""Which predictions a site's calibration changes: links and GPUs of its runs, for the program that ran."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import steelyard as sy
from steelyard.core.recipe import load_recipe
from steelyard.launch import elastic_job
from steelyard.launch.elastic_job import ElasticJob
from steelyard.launch.job_spec import JobSpec, NodeGroup
from steelyard.launch.sites import SiteSection
from steelyard.launch.submit import SubmitRequest
from steelyard.planning import site_calibration
from steelyard.planning.assumptions import assumptions
from steelyard.planning.cluster import Cluster
from steelyard.planning.communication import REACHED, reached
from steelyard.planning.evidence import Evidence, Factors
from steelyard.planning.measured_layers import Profile
from steelyard.planning.predict import Predictor
from steelyard.planning.results import plan_of
from steelyard.planning.site_calibration import CalibratedRun, calibrated, path_beside
from steelyard.planning.software import KNOWN, MEGATRON
from steelyard.tune.planner_prior import PlannerPrior
from steelyard.tune.spec import load as load_tune
from tests.planning.machines import gpt, layout

CLUSTER = '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "cpu"\ngpus = 2\n'


def run(name: str = "one", gpus=("a100-40",), placement=("fast:2",), **factors) -> CalibratedRun:
    values = {"run": name, "date": "2026-11-19", "gpus": list(gpus), "layout": "", "placement": list(placement),
              "overhead": 0.0, "error_before": 0.0}  # fmt: skip
    return CalibratedRun.model_validate(values | factors)


def two_types(**more) -> Cluster:
    nodes = [
        {"type": "fast", "count": 2, "gpu": "a100-40", "gpus": 4},
        {"type": "slow", "count": 2, "gpu": "t4", "gpus": 4},
    ]
    return Cluster.model_validate({"nodes": nodes} | more)


def rates(machines: Cluster) -> dict[object, float]:
    fast, slow = machines.nodes
    wires = {"fast": machines.inside(fast), "slow": machines.inside(slow), "fast-fast": machines.wire(fast, fast),
             "fast-slow": machines.wire(fast, slow), "slow-slow": machines.wire(slow, slow)}  # fmt: skip
    return {name: reached(wire) for name, wire in wires.items()}


@pytest.mark.parametrize(
    ("placement", "slower"),
    [
        (["fast:1"], {"fast"}),
        (["fast:2"], {"fast", "fast-fast"}),
        (["fast:1", "slow:1"], {"fast", "slow", "fast-slow"}),
    ],
)
@pytest.mark.parametrize("links", [[], [{"between": ["*", "*"], "GBps": 12.5}]])
def test_a_calibration_scales_the_links_that_its_run_used_given_or_not(placement, slower, links):
    machines = two_types(links=links)
    before, after = rates(machines), rates(calibrated(machines, [run(placement=placement, communication=2.0)]))
    assert {name for name in before if after[name] != before[name]} == slower
    assert all(after[name] == pytest.approx(before[name] / 2) for name in slower)


def test_a_calibrated_default_is_still_an_assumption():
    machines, planned = two_types(), layout([("fast", 2)], [1, 1], data=4)
    before, after = (
        assumptions(Predictor(gpt(), each), planned)
        for each in (machines, calibrated(machines, [run(communication=2.0)]))
    )
    assert before == after
    assert any(each.key == "intra_GBps" and each.best_plan for each in before)


def test_a_measured_link_is_used_as_measured():
    known = {"gpu": "a100-40", "device": "A100", "precision": "fp16", "hidden": 1024, "sequence_length": 1024,
             "date": "", "versions": {}, "host": {}, "rates": {"link_gbps": 100.0},
             "layers": [{"tensor": 1, "micro_batch": 1, "forward": 1e-3, "backward": 2e-3}]}  # fmt: skip
    profile, machines = Profile.model_validate(known), two_types()
    known_site = calibrated(machines, [run(communication=2.0, forward=3.0, backward=3.0)])
    chosen = layout([("fast", 2)], (8,), data=8)
    with_both, with_profile = (Predictor(gpt(), each, profiles=[profile]) for each in (known_site, machines))
    inside = with_both.cluster.inside(with_both.cluster.nodes[0])
    assert reached(inside) == pytest.approx(100e9)
    assert inside.bandwidth == pytest.approx(100e9 / REACHED["nvlink"])
    # The profile replaces the site's factors of compute, which were measured without it.
    assert with_both.costs(chosen)[0].layer.forward == pytest.approx(with_profile.costs(chosen)[0].layer.forward)


def test_a_run_without_a_phase_does_not_dilute_the_factor_of_others():
    machines = calibrated(two_types(), [run(forward=2.0), run("two", forward=8.0), run("three")])
    assert machines.evidence.site["a100-40"] == Factors(pytest.approx(4.0), 1.0, 1.0)


def test_measurements_of_steelyard_do_not_scale_other_programs():
    machines = two_types()
    known = machines.with_evidence(
        Evidence(site={"a100-40": Factors(3.0, 3.0, 3.0)}, overhead=1.0, network={frozenset({"fast"}): 5.0})
    )
    chosen, recipe = layout([("fast", 2)], (8,), data=8), gpt()
    for program in KNOWN.values():
        before, after = (plan_of(Predictor(recipe, each, program), chosen) for each in (machines, known))
        is_own = program is KNOWN["steelyard"]
        assert (after.seconds > 1.5 * before.seconds) == is_own
        if not is_own:
            assert (after.parts, after.range) == (before.parts, before.range)


def test_a_profile_gives_other_programs_its_rates_and_not_its_layers():
    machines, chosen, recipe = two_types(), layout([("fast", 1)], (8,), data=4), gpt()
    known = {"gpu": "a100-40", "device": "A100", "precision": "fp16", "hidden": 1024, "sequence_length": 1024,
             "date": "", "versions": {}, "host": {}, "rates": {},
             "layers": [{"tensor": 1, "micro_batch": 1, "forward": 1.0, "backward": 2.0}]}  # fmt: skip
    slow = Profile.model_validate(known)
    without = Predictor(recipe, machines, MEGATRON)
    with_ = Predictor(recipe, machines, MEGATRON, profiles=[slow])
    assert with_.seconds(chosen) == without.seconds(chosen)
    assert plan_of(with_, chosen).range == plan_of(without, chosen).range
    rated = Profile.model_validate(known | {"rates": {"product_tflops": 30.0, "link_gbps": 1.0}})
    assert Predictor(recipe, machines, MEGATRON, profiles=[rated]).seconds(chosen) > 1.5 * without.seconds(chosen)


@pytest.fixture
def calibrated_site(in_workplace):
    """A cluster file with a calibration of two runs of Steelyard and one of TorchTitan."""
    Path("cluster.toml").write_text(CLUSTER)
    runs = [run(name, ["cpu"], ["a:1"], forward=2.0, backward=2.0) for name in ("one", "two")]
    runs.append(run("other", ["cpu"], ["a:1"], software="torchtitan", forward=9.0, backward=9.0))
    site_calibration.write(path_beside(Path("cluster.toml")), runs)
    return in_workplace


def test_the_api_uses_the_calibration_of_the_program_and_says_so(calibrated_site, capfd):
    plain, ours = (sy.plan("tiny.toml", "cluster.toml", top=1, calibration=use).plans[0] for use in (False, True))
    assert ours.parts.compute > 1.5 * plain.parts.compute
    said = capfd.readouterr().err
    assert "calibrated with 2 runs: cluster.calibration.toml" in " ".join(said.split())
    assert "not calibrated with 1 run of torchtitan" in " ".join(said.split())
    one, two = (
        sy.plan("tiny.toml", "cluster.toml", top=1, software="megatron", calibration=use).plans[0].seconds
        for use in (False, True)
    )
    assert one == two
    assert "this plan is for megatron" in " ".join(capfd.readouterr().err.split())


def test_the_planner_of_a_study_uses_the_calibration(calibrated_site):
    Path("study.toml").write_text('recipe = "tiny.toml"\ncluster = "cluster.toml"\nspace.train.micro_batch = [1, 2]\n')
    with_ = PlannerPrior(load_tune("study.toml")).of({"train.micro_batch": 1}).predicted["seconds"]
    path_beside(Path("cluster.toml")).unlink()
    without = PlannerPrior(load_tune("study.toml")).of({"train.micro_batch": 1}).predicted["seconds"]
    assert with_ > 1.3 * without


def test_an_elastic_job_plans_with_the_calibration_of_its_submission(calibrated_site):
    recipe, here = load_recipe("tiny.toml", ["train.device=cpu"]), calibrated_site.path
    spec = JobSpec(
        run=here, site=SiteSection(), submitted="now", groups=[NodeGroup(1, 2)], command=["true"], name="x",
        python="python3", workdir=str(here), min_nodes=1,
    )  # fmt: skip
    request = SubmitRequest("slurm", SiteSection(), recipe, cluster=Path("cluster.toml"))
    job = elastic_job.of_request(request, spec)
    again = ElasticJob(**json.loads(json.dumps(asdict(job))))  # As elastic.json carries it to the job.
    path_beside(Path("cluster.toml")).unlink()
    assert again.machines.evidence.site == {"cpu": Factors(pytest.approx(2.0), pytest.approx(2.0), 1.0)}
    assert elastic_job.of_request(request, spec).machines.evidence == Evidence()


def test_a_calibration_file_is_read_as_it_was_written(tmp_path):
    path, runs = tmp_path / "c.toml", [run(communication=1.5), run("two", error_after=0.1)]
    site_calibration.write(path, runs)
    assert site_calibration.load(path).runs == runs
