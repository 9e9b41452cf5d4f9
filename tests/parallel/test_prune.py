"""One-shot pruning on several ranks: the same weights, bit for bit, as by one process."""

from functools import partial

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from tests.checkpoint.models import Held, written
from tests.parallel import jobs
from tests.sparsity.small import LENGTH, SAMPLES, write_text
from tests.sparsity.test_experts import CONFIG as EXPERTS

LAYOUTS = {"data": (2, 1), "tensor": (2, 2), "data x tensor": (4, 2), "uneven data": (4, 1), "many tensor": (3, 3)}
ROUNDING = 1e-3  # the share of the weights that a GPU may prune otherwise


def pruning(layouts, folder, size, tensor, method, out, source=None, **options):
    """Prune a small model on so many ranks."""
    source = source or folder / "qwen2-hf"
    if not source.exists():
        source = written(folder, "qwen2")
    request = {"checkpoint": str(source), "destination": folder / out, "method": method}
    request |= {"calibration": write_text(folder), "samples": SAMPLES, "length": LENGTH, "tensor": tensor}
    return layouts.ranks.do(size, jobs.pruning, request | {"device": "cpu"} | options)


def share_pruned_otherwise(layouts, size, tensor) -> float:
    """The share of the weights that so many ranks prune and one process keeps, or the reverse."""
    folder = layouts.folder / f"prune-{size}-{tensor}"
    folder.mkdir()
    for ranks, each, out in ((1, 1, "alone"), (size, tensor, "together")):
        pruning(layouts, folder, ranks, each, "sparsegpt", out, device="cuda" if torch.cuda.is_available() else "cpu")
    ours, theirs = weights(folder / "together"), weights(folder / "alone")
    unlike = sum(((ours[name] == 0) != (theirs[name] == 0)).sum().item() for name in ours)
    return unlike / sum(each.numel() for each in ours.values())


@pytest.fixture
def pruned(layouts, tmp_path):
    return partial(pruning, layouts, tmp_path)


def weights(folder) -> dict[str, torch.Tensor]:
    source = open_source(folder)
    return {name: source.tensor(name) for name in source.names()}


def assert_alike(one, other) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pruning_is_alike_on_a_layout(pruned, tmp_path, layout, method):
    size, tensor = LAYOUTS[layout]
    [alone] = pruned(1, 1, method, "alone")
    together = pruned(size, tensor, method, "together")
    assert_alike(tmp_path / "together", tmp_path / "alone")
    keys = ("sparsity", "error")
    for report in together:
        assert (report["ranks"], report["tensor"]) == (size, tensor)
        for ours, theirs in zip(report["layers"], alone["layers"], strict=True):
            assert [ours[key] for key in keys] == [theirs[key] for key in keys]
    assert not (tmp_path / ".together.pruning").exists()


@pytest.mark.parametrize("layout", ["uneven data", "data x tensor"])
def test_experts_are_pruned_alike_on_a_layout(pruned, tmp_path, layout):
    size, tensor = LAYOUTS[layout]
    convert(Held(EXPERTS), tmp_path / "experts", Target("hf"))
    pruned(1, 1, "sparsegpt", "alone", tmp_path / "experts")
    pruned(size, tensor, "sparsegpt", "together", tmp_path / "experts")
    assert_alike(tmp_path / "together", tmp_path / "alone")


def test_a_pruning_that_one_rank_ended_continues_on_another_layout(pruned, tmp_path):
    pruned(1, 1, "sparsegpt", "whole")
    first = pruned(2, 1, "sparsegpt", "out", fails_at_layer=2)
    assert ["gave up" in str(said) or "lost" in str(said) for said in first] == [True, True]
    assert not (tmp_path / "out").exists()
    assert [report["resumed_layers"] for report in pruned(4, 2, "sparsegpt", "out")] == [2] * 4
    assert_alike(tmp_path / "out", tmp_path / "whole")


def test_more_data_ranks_than_batches_of_windows_are_refused_on_every_rank(pruned):
    said = pruned(4, 1, "wanda", "out", samples=3)
    assert ["4 data ranks share 3 batches" in str(each) for each in said] == [True] * 4
