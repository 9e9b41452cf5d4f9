"""`steelyard plan` as a person uses it, at toy size."""

import json
import re
from pathlib import Path

import pytest

from steelyard.cli.options import parse_count
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.run import for_training
from steelyard.planning import prediction_check, slurm_cluster
from steelyard.planning.cluster import load as load_cluster

CLUSTER = """
name = "laptop"

[[nodes]]
type = "laptop"
count = 1
gpu = "cpu"
gpus = 2
price_hour = 0.1
"""
COLD = """
[[nodes]]
type = "a"
count = 1
gpu = "mine"
gpus = 1

[[gpus]]
name = "mine"
memory_gib = 16
fp16 = 50.0
bandwidth_gb = 500.0
"""
SINFO = """\
n060|gpu2*|gpu:a10:4(S:0-1)
n061|gpu2*|gpu:a10:4(S:0-1)
n060|all|gpu:a10:4(S:0-1)
n070|gpu1|gpu:a100:8
n071|gpu1|gpu:wonder9000:2
c001|cpu|(null)
"""


@pytest.fixture
def planning(workplace):
    (workplace.path / "cluster.toml").write_text(CLUSTER)
    return workplace


@pytest.mark.slow
def test_the_written_recipe_trains_as_it_is_and_its_run_can_be_checked(planning):
    words = ("plan", "--model", "tiny.toml", "--cluster", "cluster.toml", "--json", "--excluded", "--tokens", "1M")
    planned = planning.steelyard(*words, "--write", "planned.toml", "--explain", "plan.html", "--pareto", "front.html")
    assert planned.returncode == 0, planned.stderr
    answer = json.loads(planned.stdout)
    best = answer["plans"][0]
    assert "excluded" in answer
    assert answer["tokens"] == 1_000_000
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert best["dollars"] == pytest.approx(best["days"] * 24 * 0.1)
    assert all(rank["total_bytes"] <= rank["usable_bytes"] for rank in answer["memory"])
    assert "<rect" in (planning.path / "plan.html").read_text()
    front = (planning.path / "front.html").read_text()
    assert "steelyard.here()" in front
    assert re.search(r"80% range: .* days, .* dollars", front)
    assert "80% range" in (planning.path / "plan.html").read_text()
    recipe = load_recipe(planning.path / "planned.toml")
    assert recipe.parallel.data == best["data"]
    assert recipe.train.micro_batch == best["micro_batch"]
    trained = planning.steelyard("train", "planned.toml", "train.steps=4", "--nproc", str(best["world"]))
    assert trained.returncode == 0, trained.stderr
    checked = planning.steelyard("plan", "--check", "runs/tiny", "--cluster", "cluster.toml", "--json")
    assert checked.returncode == 0, checked.stderr
    compared = json.loads(checked.stdout)
    assert compared["measured_seconds"] > 0
    assert compared["predicted_seconds"] == pytest.approx(sum(part["predicted"] for part in compared["parts"].values()))
    assert compared["measured_bytes"] > 0
    assert compared["predicted_bytes"] == sum(compared["predicted_bytes_by_kind"].values())
    assert "resident set of the process" in planning.steelyard("plan", "--check", "runs/tiny", *words[3:5]).stdout


@pytest.mark.parametrize(
    ("device", "peak", "said"),
    [("cuda:0", 3 << 20, "peak memory of tensors on the GPU"), ("cpu", 9 << 20, "minus the 1.00 MiB"),
     ("cpu", None, "recorded no memory")],
)  # fmt: skip
def test_a_runs_memory_is_held_against_its_prediction(planning, device, peak, said):
    run = for_training(load_recipe(planning.recipe, ["name=told"]), planning.path / "told")
    run.update(world_size=1, device=device, memory_before=1 << 20)
    run.append({"step": 1, "loss": 1.0, "seconds": 0.1} | ({"peak_memory": peak} if peak else {}))
    compared = prediction_check.compare(run.path, load_cluster(planning.path / "cluster.toml"))
    assert compared.measured_bytes == (peak - (1 << 20) if peak else None)
    assert said in prediction_check.as_text(compared)
    assert "optimizer" in compared.kinds


@pytest.mark.parametrize(("factor", "where"), [(1.0, "inside"), (3.0, "outside"), (0.3, "outside")])
def test_a_check_says_whether_the_measured_step_is_inside_the_range(planning, factor, where):
    run = for_training(load_recipe(planning.recipe, ["name=ranged"]), planning.path / "ranged")
    run.update(world_size=1, device="cpu")
    machines = load_cluster(planning.path / "cluster.toml")
    run.append({"step": 1, "loss": 1.0, "seconds": 1.0})
    predicted = prediction_check.compare(run.path, machines).predicted
    for step in (2, 3):
        run.append({"step": step, "loss": 1.0, "seconds": factor * predicted})
    compared = prediction_check.compare(run.path, machines)
    result, text = prediction_check.as_result(compared), prediction_check.as_text(compared)
    assert result["seconds_low"] < predicted < result["seconds_high"]
    assert result["inside_range"] == (where == "inside")
    assert f"the measured step is {where} the 80% range of the prediction, {compared.range} s" in text


def test_a_refusal_names_the_nearest_miss(planning):
    answer = planning.steelyard("plan", "--model", "gpt2-xl", "--cluster", "cluster.toml", "--set", "model.layers=64")
    assert answer.returncode == 1
    assert "no layout of gpt2-xl fits" in answer.stderr
    miss = re.search(r"the nearest miss is (.*): ([\d.]+) GiB too much: pipeline rank (\d) needs ([\d.]+) GiB, but cpu "
                     r"has ([\d.]+) GiB", answer.stderr.replace("\n", " "))  # fmt: skip
    assert miss is not None, answer.stderr
    lacks, needs, has = (float(miss[group]) for group in (2, 4, 5))
    assert lacks == pytest.approx(needs - has, abs=0.02)
    assert has == 3.5  # 4 GiB for each rank, an eighth of it reserved


def test_a_plan_is_explained_to_a_person(planning):
    shown = planning.steelyard("plan", "--model", "tiny.toml", "--cluster", "cluster.toml", "--top", "2")
    assert shown.returncode == 0, shown.stderr
    for word in ("compute", "bubble", "gradient", "optimizer", "memory per rank", "activations", "dollars", "layers"):
        assert word in shown.stdout


def test_the_recipes_own_layout_can_be_predicted(planning):
    words = ("plan", "--model", "tiny.toml", "--cluster", "cluster.toml", "--given", "--json")
    found = planning.steelyard(*words, "--set", "parallel.pipeline=2", "--set", "parallel.partition=2-0")
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    plans = answer["plans"]
    assert [plan["partition"] for plan in plans] == ["2-0"]
    assert "excluded" not in answer
    other = planning.steelyard(*words, "--software", "megatron")
    assert json.loads(other.stdout)["plans"][0]["seconds"] != plans[0]["seconds"]


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("--model", "tiny.toml"), "a plan needs a recipe and a cluster", 2),
        (("--model", "tiny.toml", "--cluster", "none.toml"), "none.toml: cannot be read", 2),
        (("--model", "tiny.toml", "--cluster", "bad.toml"), "bad.toml:4: the GPU toaster is not known", 2),
        (("--model", "tiny.toml", "--cluster", "free.toml", "--objective", "cost"), "the price of a is not known", 2),
        (("--model", "tiny.toml", "--cluster", "cluster.toml", "--tokens", "many"), "is not a number of tokens", 2),
        (("--model", "tiny.toml", "--cluster", "cluster.toml", "--given", "--set", 'parallel.placement=["a10:1"]'),
         "the cluster has no nodes of type a10", 2),
        (("--model", "tiny.toml", "--cluster", "cold.toml", "--objective", "energy"), "the power of mine is not", 2),
        (("--check", "runs/none", "--cluster", "cluster.toml", "--software", "megatron"), "reads the recipe from", 2),
        (("--model", "tiny.toml", "--cluster", "cluster.toml", "--objective", "energy", "--pareto", "x.html"),
         "not energy", 2),
        (("--check", "runs/none", "--cluster", "cluster.toml"), "there is no run folder runs/none", 2),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_message(planning, words, said, code):
    (planning.path / "bad.toml").write_text('[[nodes]]\ntype = "a"\ncount = 1\ngpu = "toaster"\ngpus = 1\n')
    (planning.path / "free.toml").write_text('[[nodes]]\ntype = "a"\ncount = 1\ngpu = "cpu"\ngpus = 1\n')
    (planning.path / "cold.toml").write_text(COLD)
    answer = planning.steelyard("plan", *words)
    assert answer.returncode == code
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("text", ["", "inf", "nan", "1e400B", "-3B", "0", "B"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(UserError, match="is not a number of tokens"):
        parse_count("--tokens", "tokens", text)


def test_sinfo_becomes_a_cluster_file(tmp_path):
    found = slurm_cluster.nodes(SINFO)
    assert [(entry["type"], entry["count"], entry["gpus"], entry["partition"]) for entry in found] == [
        ("a10", 2, 4, "gpu2"),
        ("a100", 1, 8, "gpu1"),
        ("wonder9000", 1, 2, "gpu1"),
    ]
    assert found[1]["gpu"] == "a100-80"
    path = tmp_path / "cluster.toml"
    path.write_text(slurm_cluster.as_toml(found[:2]))
    assert load_cluster(path).ranks == 16
    path.write_text(slurm_cluster.as_toml(found))
    assert "wonder9000 is not in the catalogue" in path.read_text()
    with pytest.raises(UserError, match="wonder9000 is not known"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("gres", "features", "gpu", "is_guessed"),
    [
        ("gpu:a100:4", "", "a100-80", True),
        ("gpu:a100:4", "ib,a100_40gb", "a100-40", False),
        ("gpu:a100_80gb:4", "", "a100-80", False),
        ("gpu:nvidia_a100-sxm4-40gb:4", "", "a100-40", False),
        ("gpu:v100:4", "gpu_mem:16gb,skylake", "v100-16", False),
        ("gpu:v100:4", "mem512g", "v100-32", True),
        ("gpu:tesla_v100-sxm2-32gb:4", "", "v100-32", False),
        ("gpu:h100:4", "pcie", "h100-pcie", False),
        ("gpu:h100:4", "", "h100-80", False),
        ("gpu:rtx3090:4", "", "rtx3090", False),
        ("gpu:geforce_rtx_3090:4", "", "rtx3090", False),
        ("gpu:a10:4(S:0-1)", "", "a10", False),
        ("gpu:gh200:4", "144g", "gh200-144", False),
        ("gpu:a100_3g.20gb:2", "", "a100_3g.20gb", True),
    ],
)  # fmt: skip
def test_memory_that_slurm_tells_is_used_and_what_is_guessed_is_said(gres, features, gpu, is_guessed):
    [entry] = slurm_cluster.nodes(f"n1|p|{gres}|{features}|515000\n")
    assert entry["gpu"] == gpu
    assert entry["host_gib"] == 502.9
    assert ("guessed" in entry) == is_guessed
    assert ("a guess: " + entry.get("guessed", "100")) in slurm_cluster.as_toml([entry])
    assert any(entry["type"] in said for said in slurm_cluster.guesses([entry])) == is_guessed


@pytest.mark.parametrize("text", ["", "c001|cpu|(null)\n", "one two three\n"])
def test_what_is_not_sinfos_output_is_refused(text):
    with pytest.raises(UserError):
        slurm_cluster.nodes(text)


def test_plan_cluster_reads_a_saved_output(tmp_path, workplace):
    Path(workplace.path / "sinfo.txt").write_text(SINFO)
    answer = workplace.steelyard("plan", "cluster", "--from", "sinfo.txt", "--out", "found.toml")
    assert answer.returncode == 0, answer.stderr
    assert (workplace.path / "found.toml").read_text().count("[[nodes]]") == 3
    for said in ("assumed a100-80; otherwise write a100-40", "wonder9000 is not in the catalogue", "is a guess"):
        assert said in answer.stderr
