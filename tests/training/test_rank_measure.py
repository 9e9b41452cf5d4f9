"""One rank of a layout, measured on a CPU with fake process groups."""

import ast
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.parallel.fake_group import even_counts, fake_world
from steelyard.sizes.param_count import parameters
from steelyard.training.rank_measure import measure

SMALL = (
    "train.device=cpu", "train.precision=fp32", "model.layers=4", "model.hidden=64", "model.heads=4", "model.ffn=192",
    "model.vocab=500", "data.sequence_length=64", "train.micro_batch=4",
)  # fmt: skip
EXPERTS = (
    "model.kv_heads=2", "model.head_dim=16", "model.experts=8", "model.experts_per_token=2", "model.expert_ffn=48"
)  # fmt: skip


def small(name: str = "llama3.2-1b", *overrides: str):
    own = {"llama3.2-1b": ("model.kv_heads=2",), "qwen3-30b-a3b": EXPERTS}.get(name, ())
    return load_recipe(name, [*SMALL, *own, *overrides])


def test_buffers_from_other_ranks_have_finite_values():
    with fake_world(5, 512):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 512)
        shard, whole = torch.arange(3.0), torch.full((3 * 512,), torch.nan)
        dist.all_gather_into_tensor(whole, shard)
        assert torch.equal(whole, shard.repeat(512))
        part = torch.full((3,), torch.nan)
        dist.reduce_scatter_tensor(part, torch.arange(3.0 * 512))
        assert part.tolist() == [15.0, 16.0, 17.0]
        received = torch.full((1000, 100), torch.nan)
        dist.recv(received, src=4)
        assert abs(received.mean()) < 0.05
        assert received.std() == pytest.approx(1, abs=0.05)
        again = torch.empty_like(received)
        dist.recv(again, src=4)
        assert torch.equal(again, received)
    assert not dist.is_initialized()


def private_imports(path: Path) -> list[str]:
    """Modules of torch's private fake process group that a file imports."""
    text = path.read_text(encoding="utf-8")
    if "fake_pg" not in text and "FakeStore" not in text and "torch.testing._internal" not in text:
        return []
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("torch.testing._internal.distributed")]


def test_torchs_private_fake_group_is_imported_in_one_file_only(tmp_path):
    root = Path(__file__).parents[2]
    files = [path for folder in ("steelyard", "benchmarks", "tools", "tests") for path in (root / folder).rglob("*.py")]
    found = {path.relative_to(root).as_posix() for path in files if private_imports(path)}
    assert found == {"steelyard/parallel/fake_group.py"}
    other = tmp_path / "other.py"
    for line in ("from torch.testing._internal.distributed.fake_pg import FakeStore",
                 "def f():\n    import torch.testing._internal.distributed.fake_pg as fake"):  # fmt: skip
        other.write_text(line)
        assert private_imports(other)


def test_received_slots_are_an_even_load():
    sent = torch.tensor([[90, 0, 1], [0, 4, 6]])
    assert even_counts(sent, 1.0).tolist() == [[17, 17, 17], [17, 17, 16]]
    assert even_counts(sent, 1.5).sum() == round(101 * 1.5)
    with fake_world(0, 2, imbalance=2.0):
        counts = torch.empty_like(sent)
        dist.all_to_all_single(counts, sent)
        assert counts.sum() == 202
        rows = torch.full((4, 2), torch.nan)
        dist.all_to_all_single(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [1, 3], [1, 1])
        assert rows.tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]


def test_the_measured_ranks_of_a_layout_hold_the_whole_model_together(capsys, monkeypatch):
    monkeypatch.setattr("steelyard.core.console.SECONDS_BETWEEN_LINES", 0.0)
    recipe = small("llama3.2-1b", "parallel.pipeline=2", "parallel.zero=3", "train.global_batch=16", "model.tied=false")
    ranks = measure(recipe, 4, range(4), steps=1)["ranks"]
    assert [rank["stages"] for rank in ranks] == [[0], [0], [1], [1]]
    padded = parameters(recipe.model, 1, padded=True).total
    assert sum(rank["parameters"] for rank in ranks) == padded
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("measuring ")]
    assert "100%" in shown[-1]
    assert " left  rank 3" in shown[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "rank", "layout"),
    [
        ("llama3.2-1b", 1, 0, ("train.global_batch=4",)),
        ("gpt2-small", 1, 0, ("train.global_batch=8",)),
        ("llama3.2-1b", 4, 3, ("train.global_batch=16", "parallel.zero=3")),
        ("llama3.2-1b", 64, 7, ("train.global_batch=512", "parallel.zero=1")),
        ("llama3.2-1b", 2, 1, ("train.global_batch=4", "parallel.tensor=2")),
        ("llama3.2-1b", 4, 2, ("train.global_batch=32", "parallel.pipeline=2", "parallel.zero=1")),
        ("qwen3-30b-a3b", 8, 0, ("train.global_batch=32", "parallel.expert=4", "parallel.zero=1")),
    ],
)
def test_predicted_memory_is_near_the_tensors_of_a_step(name, world, rank, layout):
    [found] = measure(small(name, *layout, "model.hidden=128", "data.sequence_length=128"), world, [rank], 1)["ranks"]
    assert found["memory_error"] == pytest.approx(0, abs=0.1)
    assert all(seconds > 0 for seconds in found["seconds"].values())


def test_a_step_runs_with_every_schedule_and_reports_its_routing():
    for schedule in ("interleaved", "zero-bubble"):
        layout = ("parallel.pipeline=2", "parallel.virtual=2", f"parallel.schedule={schedule}", "train.global_batch=8")
        [found] = measure(small("llama3.2-1b", *layout, "train.micro_batch=1"), 2, [1], 1)["ranks"]
        assert found["stages"] == [1, 3]
    result = measure(small("qwen3-30b-a3b", "parallel.expert=2", "train.global_batch=8"), 2, [0], 1, imbalance=1.5)
    assert "1.5 times as many slots" in result["routing"]
    assert result["ranks"][0]["expert_load"] >= 1


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="no rank 8 of 8"):
        measure(small("llama3.2-1b", "train.global_batch=32"), 8, [8])


@pytest.mark.slow
def test_a_measurement_is_evidence_for_the_plan_and_checks_the_dry_run(workplace):
    layout = ("parallel.tensor=2", "train.global_batch=8", "train.micro_batch=1")
    options = ("--world", "4", "--steps", "1", "--profile", "traces", "--json")
    measured = workplace.steelyard("plan", "measure", "tiny.toml", *layout, *options)
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout)
    [rank] = found["ranks"]
    assert found["layout"]["data"] == 2
    assert any("NCCL" in each for each in found["not_measured"])
    [profile] = found["profiles"]
    assert (profile["rank"], profile["steps"]) == (0, 1)
    assert 0 < profile["busy"] <= profile["seconds"]
    assert any(each["name"].startswith("aten::") for each in profile["kernels"])
    nodes = '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "cpu"\ngpus = 4\n'
    (workplace.path / "cluster.toml").write_text(nodes)
    words = ("plan", "--model", "tiny.toml", "--cluster", "cluster.toml", "--given", "--json")
    words += tuple(word for each in layout for word in ("--set", each))
    planned = workplace.steelyard(*words, "--measured", "measured.json")
    assert planned.returncode == 0, planned.stderr
    answer = json.loads(planned.stdout)
    parts = answer["plans"][0]["parts"]
    assert parts["compute"] + parts["optimizer"] == pytest.approx(rank["compute_seconds"], rel=0.05)
    assert answer["memory"][0]["total_bytes"] == rank["peak_bytes"]
    without = json.loads(workplace.steelyard(*words).stdout)["plans"][0]["parts"]
    assert without["compute"] != pytest.approx(parts["compute"], rel=0.05)
    dry = workplace.steelyard("train", "tiny.toml", *layout, "--dry-run", "--world", "4", "--measured", "measured.json")
    assert "measured rank" in dry.stdout, dry.stderr
    other = workplace.steelyard(
        "train", "tiny.toml", *layout[1:], "--dry-run", "--world", "4", "--measured", "measured.json"
    )
    assert other.returncode == 2
    assert "another layout" in other.stderr
    refused = workplace.steelyard("plan", "measure", "tiny.toml", *layout, "--world", "4", "--profile", "tiny.toml")
    assert refused.returncode == 2
    assert "--profile: tiny.toml is not a folder" in refused.stderr
    for change in ({"world": 8}, {"layout": {}}, {"ranks": []}, {"gpu": "h100"}, {"precision": "fp8"}):
        (workplace.path / "bad.json").write_text(json.dumps(found | change))
        refused = workplace.steelyard(*words, "--measured", "bad.json")
        assert refused.returncode == 2, refused.stderr
        assert "bad.json" in refused.stderr
