"""Training under masks: N:M weights that learn, and pruned weights whose zeros stay."""

import shutil

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.model.modules import Linear
from steelyard.sparsity import frozen_base, mask_file, pruned_source
from steelyard.sparsity.masked_training import _Largest, _LargestProduct
from steelyard.sparsity.patterns import Pattern
from tests.sparsity.conftest import Place
from tests.sparsity.test_masked_linear import magnitude_masks, records

QUICK = ("train.steps=12", "eval.every=0", "checkpoint.every=0")


def test_straight_through_gradients_and_a_pull_on_what_is_out():
    weight = torch.tensor([[3.0, -1.0, 2.0, 0.5]], requires_grad=True)
    mask = Pattern(2, 4).keep_best(weight.detach().abs())
    kept = _Largest.apply(weight, mask, torch.tensor([0.1]))
    (kept * torch.tensor([[1.0, 10.0, 100.0, 1000.0]])).sum().backward()
    assert kept.tolist() == [[3.0, 0.0, 2.0, 0.0]]
    assert torch.allclose(weight.grad, torch.tensor([[1.0, 10.0 - 0.1, 100.0, 1000.0 + 0.05]]))


def test_a_tensor_parallel_shard_multiplies_with_the_ties_of_the_whole_weight():
    weight, x = torch.ones(8, 32), torch.eye(32)

    def masked(shard, piece, inputs):
        linear = Linear(piece.shape[1], piece.shape[0], bias=False)
        linear.weight.data, linear.shard = piece.clone(), shard
        return _LargestProduct(linear, Pattern(2, 4), torch.zeros(1))(inputs, linear.weight, None)

    whole = masked((0, 0, 1), weight, x)
    assert whole.sum() == 8 * 16
    rows = [masked((0, index, 2), piece, x) for index, piece in enumerate(weight.chunk(2))]
    assert torch.equal(torch.cat(rows, dim=1), whole)
    columns = [masked((1, index, 2), piece, torch.eye(16)) for index, piece in enumerate(weight.chunk(2, dim=1))]
    assert torch.equal(torch.cat(columns), whole)


def test_n_of_m_training_learns_and_is_seen_through_its_masks(place: Place):
    settings = ("sparsity.method=sr-ste", "sparsity.pattern=2:8", "train.init_from=base", "train.steps=30")
    run = place.train("sparse", *settings, "eval.every=0", "checkpoint.every=0", "optim.learning_rate=3e-3")
    valid = records(run, "valid_loss")
    assert valid[-1] < valid[0] - 0.1
    seen = pruned_source.opened(run.path)
    for name in seen.masks.names():
        tensor = seen.tensor(name)
        assert (tensor.reshape(-1, 8).count_nonzero(1) <= 2).all()
    dense = pruned_source.opened(run.path, mask="none")
    assert dense.tensor("layers.0.mlp.up.weight").count_nonzero() > 0.9 * dense.tensor("layers.0.mlp.up.weight").numel()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_zeros_of_a_mask_file_stay_under_any_optimizer(place: Place, optimizer: str):
    chosen = magnitude_masks(place)
    settings = ("sparsity.method=fixed", "sparsity.mask=magnitude.mask", "train.init_from=base", *QUICK)
    run = place.train("tuned", *settings, f"optim.name={optimizer}")
    valid, after = records(run, "valid_loss"), open_source(run.path)
    assert valid[-1] < valid[0]
    for name, mask in chosen.items():
        assert torch.equal(after.tensor(name) != 0, mask)
    assert records(run, "zeros") == [0.5] * 6
    # The run's own zeros are what the next run keeps.
    again = place.train("again", "sparsity.method=fixed", "train.init_from=tuned", *QUICK)
    assert all(torch.equal(open_source(again.path).tensor(name) != 0, mask) for name, mask in chosen.items())


def test_learned_masks_are_kept_while_their_weights_are_tuned(place: Place):
    learned = place.learn("masks", "train.steps=2")
    run = place.train("tuned", "sparsity.method=fixed", "train.init_from=masks", *QUICK)
    seen, after = pruned_source.opened(learned.path), open_source(run.path)
    assert all(torch.equal(after.tensor(name) != 0, seen.tensor(name) != 0) for name in seen.masks.names())


def test_dense_weights_have_no_zeros_to_keep(place: Place):
    with pytest.raises(UserError, match="have no zeros"):
        place.train("tuned", "sparsity.method=fixed", "train.init_from=base", *QUICK)


def test_a_mask_file_that_was_found_for_other_weights_is_refused(place: Place):
    chosen = magnitude_masks(place)
    settings = ("sparsity.method=fixed", "train.init_from=base", *QUICK, "train.steps=1")
    for name, known in (
        ("own", frozen_base.identity(open_source("base"))),
        ("other", {"path": "x", "sha256": "0" * 64}),
    ):
        mask_file.write(place.path / f"{name}.mask", chosen.items(), Pattern(2, 4), known)
    place.train("tuned", *settings, "sparsity.mask=own.mask")
    with pytest.raises(UserError, match="belong to other weights"):
        place.train("refused", *settings, "sparsity.mask=other.mask")


def test_a_base_that_was_moved_is_asked_for_where_its_masks_are_kept(place: Place):
    (place.path / "base").unlink()
    shutil.copytree(place.path.joinpath("tiny.toml").resolve().parent / "base", place.path / "base")
    place.learn("masks", "train.steps=1")
    shutil.move(place.path / "base", place.path / "moved")
    settings = ("sparsity.method=fixed", "train.init_from=masks", *QUICK, "train.steps=1")
    with pytest.raises(UserError, match="do not exist at") as asked:
        place.train("tuned", *settings)
    assert "sparsity.base=PATH" in str(asked.value)
    place.train("tuned", *settings, "sparsity.base=moved")
    with pytest.raises(UserError, match="has its own weights") as refused:
        place.train("again", *settings, "train.init_from=tuned", "sparsity.base=moved")
    assert "sparsity.base" in str(refused.value)


def test_masks_of_another_model_are_refused(place: Place):
    mask_file.write(place.path / "other.mask", [("layers.0.mlp.up.weight", torch.eye(4).bool())], Pattern(1, 4), {})
    with pytest.raises(UserError, match=r"has no mask for layers\.0\.attention\.query\.weight"):
        place.learn("masks", "sparsity.prior=other.mask")
