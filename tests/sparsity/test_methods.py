"""The one-shot methods against closed forms and against the papers' algorithms written out in `published.py`."""

import pytest
import torch

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.sparsity import one_shot
from steelyard.sparsity.one_shot import Hessian, prune_matrix, reconstruction_error
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.prune_request import METHODS, method_named
from tests.sparsity import published

PATTERNS = ["2:4", "1:4", "4:8", "1:3"]


def problem(outputs=6, inputs=48, tokens=160, seed=0):
    """A matrix, and inputs whose channels differ in size and go along with each other."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=random) * 0.4 + torch.diag(torch.rand(inputs, generator=random) * 3)
    return torch.randn(outputs, inputs, generator=random), torch.randn(tokens, inputs, generator=random) @ mixing


def gram(inputs):
    return (inputs.t() @ inputs) * 2 / len(inputs)


@pytest.mark.parametrize("name", ["SparseGPT", "WANDA", "Hessian", "magnitude"])
def test_a_method_is_known_in_any_case(name):
    assert method_named(name) == name.lower()


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean sparsegpt"):
        method_named("sparse-gpt")
    with pytest.raises(UserError, match="magnitude, wanda, sparsegpt, hessian"):
        method_named("lottery")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_wanda_is_the_published_one(pattern):
    weight, inputs = problem()
    chosen = Pattern.parse(pattern)
    pruned = prune_matrix(weight, Hessian(gram(inputs)), chosen, "wanda")
    assert torch.equal(pruned.mask_OI, published.wanda(weight, inputs, chosen.keep, chosen.group))
    assert torch.equal(pruned.weight_OI, weight * pruned.mask_OI)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_hessian_is_the_published_score(pattern):
    weight, inputs = problem()
    chosen = Pattern.parse(pattern)
    pruned = prune_matrix(weight, Hessian(gram(inputs)), chosen, "hessian")
    assert torch.equal(pruned.mask_OI, published.one_look(weight, inputs, chosen.keep, chosen.group))
    assert torch.equal(pruned.weight_OI, weight * pruned.mask_OI)


@pytest.mark.parametrize("at_once", [128, 24])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparsegpt_is_the_published_one_whatever_the_blocks(pattern, at_once, monkeypatch):
    monkeypatch.setattr(one_shot, "COLUMNS_AT_ONCE", at_once)
    weight, inputs = problem()
    chosen = Pattern.parse(pattern)
    mask, updated = published.sparsegpt(weight, inputs, chosen.keep, chosen.group)
    pruned = prune_matrix(weight, Hessian(gram(inputs)), chosen, "sparsegpt", update=True)
    assert torch.equal(pruned.mask_OI, mask)
    torch.testing.assert_close(pruned.weight_OI.double(), updated, rtol=1e-3, atol=1e-4)
    kept = prune_matrix(weight, Hessian(gram(inputs)), chosen, "sparsegpt", update=False)
    assert torch.equal(kept.mask_OI, mask)
    assert torch.equal(kept.weight_OI, weight * mask)


def test_sparsegpt_without_groups_takes_the_share_from_each_block_of_columns(monkeypatch):
    monkeypatch.setattr(one_shot, "COLUMNS_AT_ONCE", 16)
    weight, inputs = problem()
    mask, updated = published.sparsegpt(weight, inputs, 0, 0, share=0.5, block=16)
    pruned = prune_matrix(weight, Hessian(gram(inputs)), Pattern.parse("0.5"), "sparsegpt", update=True)
    assert torch.equal(pruned.mask_OI, mask)
    torch.testing.assert_close(pruned.weight_OI.double(), updated, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["wanda", "hessian", "sparsegpt"])
def test_inputs_of_one_size_and_no_relation_leave_only_the_magnitude(method):
    weight, _ = problem()
    pattern = Pattern.parse("2:4")
    pruned = prune_matrix(weight, Hessian(3 * torch.eye(48)), pattern, method, update=method == "sparsegpt")
    assert torch.equal(pruned.mask_OI, prune_matrix(weight, None, pattern, "magnitude").mask_OI)
    torch.testing.assert_close(pruned.weight_OI, weight * pruned.mask_OI)


def test_one_pruned_weight_of_four_is_made_up_for_by_the_closed_form():
    # Pruning w_0 alone: the others move by -w_0 / [H^-1]_00 * [H^-1]_0 (Hassibi and Stork, 1993).
    weight = torch.tensor([[0.01, 1.0, -2.0, 3.0]])
    _, inputs = problem(inputs=4)
    inverse = published.damped_inverse(gram(inputs))
    expected = weight.double() - 0.01 / inverse[0, 0] * inverse[0]
    pruned = prune_matrix(weight, Hessian(gram(inputs)), Pattern.parse("3:4"), "sparsegpt", update=True)
    assert pruned.mask_OI.tolist() == [[False, True, True, True]]
    torch.testing.assert_close(pruned.weight_OI[0, 1:].double(), expected[0, 1:], rtol=1e-5, atol=1e-6)


def test_inputs_that_say_the_same_let_one_weight_take_over_the_other():
    # x_0 = x_1, so w_0 may go if w_1 becomes w_0 + w_1, but for the damping.
    x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    inputs = torch.stack([x[:, 0], x[:, 0], x[:, 1], x[:, 1]], dim=1)
    weight = torch.tensor([[0.5, 1.0, 0.6, 2.0]])
    pruned = prune_matrix(weight, Hessian(gram(inputs)), Pattern.parse("2:4"), "sparsegpt", update=True)
    torch.testing.assert_close(pruned.weight_OI, torch.tensor([[0.0, 1.5, 0.0, 2.6]]), rtol=0.02, atol=0.0)


def test_the_update_lowers_the_error_and_wanda_beats_magnitude():
    weight, inputs = problem(outputs=32, inputs=64, tokens=512)
    matrix, pattern = gram(inputs), Pattern.parse("2:4")

    def error(method, update=False):
        pruned = prune_matrix(weight, Hessian(matrix), pattern, method, update)
        lost, whole = reconstruction_error(weight, pruned.weight_OI, matrix)
        return lost / whole

    assert error("sparsegpt", update=True) < 0.8 * error("wanda") < error("magnitude")


def test_the_reconstruction_error_is_that_of_the_outputs():
    weight, inputs = problem()
    other = weight * Pattern.parse("2:4").keep_best(weight.abs())
    lost, whole = reconstruction_error(weight, other, gram(inputs))
    outputs, others = inputs.double() @ weight.t().double(), inputs.double() @ other.t().double()
    assert lost / whole == pytest.approx(((outputs - others).square().sum() / outputs.square().sum()).item(), rel=1e-4)


def test_a_dead_input_is_pruned_first_and_counted():
    weight, inputs = problem()
    inputs[:, [0, 1, 5]] = 0
    chosen = Pattern.parse("2:4")
    mask, updated = published.sparsegpt(weight, inputs, 2, 4)
    pruned = prune_matrix(weight, Hessian(gram(inputs)), chosen, "sparsegpt", update=True)
    assert pruned.dead == 3
    assert torch.equal(pruned.mask_OI[:, 4:], mask[:, 4:])
    assert pruned.mask_OI[:, :2].sum() == 0
    assert not pruned.weight_OI[:, [0, 1, 5]].any()
    torch.testing.assert_close(pruned.weight_OI.double(), updated, rtol=1e-3, atol=1e-4)
    assert prune_matrix(weight, Hessian(gram(inputs)), chosen, "hessian").mask_OI[:, :2].sum() == 0


def test_an_h_that_cannot_be_factored_is_damped_step_by_step():
    matrix = gram(problem()[1])
    assert one_shot.inverse_factor(matrix)[1] == 0.01
    lowest = torch.linalg.eigvalsh(matrix)[0]
    spoilt = matrix - torch.eye(48) * (lowest + 0.05 * matrix.diagonal().mean())  # Not positive until damped by 0.1.
    factor, damping = one_shot.inverse_factor(spoilt)
    assert damping == pytest.approx(0.1)
    damped = spoilt + torch.eye(48) * damping * spoilt.diagonal().mean()
    torch.testing.assert_close(factor.t() @ factor @ damped, torch.eye(48), rtol=0.0, atol=1e-2)


def test_an_h_of_no_numbers_is_given_up_with_a_reason():
    with pytest.raises(RuntimeFailure, match="cannot be factored"):
        one_shot.inverse_factor(torch.full((4, 4), float("nan")))


def test_a_weight_keeps_its_dtype_and_its_kept_values_to_the_bit():
    weight, inputs = problem()
    weight = weight.bfloat16()
    for method in METHODS:
        pruned = prune_matrix(weight, Hessian(gram(inputs)), Pattern.parse("2:4"), method)
        assert pruned.weight_OI.dtype == torch.bfloat16
        assert torch.equal(pruned.weight_OI[pruned.mask_OI], weight[pruned.mask_OI])
        assert not pruned.weight_OI[~pruned.mask_OI].any()
