"""The fused head and loss against the two in plain torch: value and both gradients."""

import pytest
import torch
from torch.nn import functional as F

from steelyard.model import loss as losses
from steelyard.model.loss import VocabHead, linear_cross_entropy

BATCH, LENGTH, HIDDEN, VOCAB, PADDED = 3, 7, 16, 97, 128


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    labels[0, 0], labels[0, 1] = 0, VOCAB - 1
    weights = torch.rand(BATCH, LENGTH, generator=generator)
    return x, weight, labels, weights


def plain(x, weight, labels, weights):
    logits = (x.float() @ weight.to(x.dtype).float().t())[..., :VOCAB]
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each if weights is None else each * weights.flatten()).sum()


@pytest.mark.parametrize("rows_at_once", [1, 4, 21, 1000])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_are_those_of_cross_entropy(monkeypatch, rows_at_once, weighted):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * VOCAB * rows_at_once)
    x, weight, labels, weights = drawn()
    weights = weights if weighted else None
    expected = plain(x, weight, labels, weights)
    wanted = torch.autograd.grad(expected * 3, (x, weight))
    found = linear_cross_entropy(x, weight, labels, weights, VOCAB, VocabHead())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found * 3, (x, weight)), wanted)


def test_rows_that_pad_get_no_gradient_and_no_share_of_the_probability():
    x, weight, labels, _ = drawn()
    with torch.no_grad():
        weight[VOCAB:] = 1e4
    found = linear_cross_entropy(x, weight, labels, None, VOCAB, VocabHead())
    torch.testing.assert_close(found, plain(x, weight, labels, None))
    found.backward()
    assert not weight.grad[VOCAB:].any()
    assert weight.grad[:VOCAB].any(dim=1).all()


def test_large_logits_do_not_overflow():
    x, weight, labels, _ = drawn()
    found = linear_cross_entropy(x * 1e3, weight * 1e2, labels, None, VOCAB, VocabHead())
    torch.testing.assert_close(found, plain(x * 1e3, weight * 1e2, labels, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_coarse_stream_still_sums_its_loss_in_fp32(dtype):
    x, weight, labels, _ = drawn(dtype)
    expected = plain(x, weight, labels, None)
    wanted = torch.autograd.grad(expected, (x, weight))
    found = linear_cross_entropy(x, weight, labels, None, VOCAB, VocabHead())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    gradients = torch.autograd.grad(found, (x, weight))
    assert [each.dtype for each in gradients] == [dtype, torch.float32]
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.02 * theirs.float().norm()


def test_without_gradients_only_the_value_is_computed():
    x, weight, labels, _ = drawn()
    with torch.no_grad():
        found = linear_cross_entropy(x, weight, labels, None, VOCAB, VocabHead())
    assert not found.requires_grad
    torch.testing.assert_close(found, plain(x, weight, labels, None).detach())


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_z_loss_changes_the_gradient_and_not_the_value(softcap):
    x, weight, labels, weights = drawn()
    weights = weights * torch.where(torch.arange(LENGTH) % 2 == 0, 1, -1)  # DPO's are negative for rejected answers.
    found = linear_cross_entropy(x, weight, labels, weights, VOCAB, VocabHead(), softcap, 0.1)
    logits = (x @ weight.t())[..., :VOCAB]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * weights.flatten()
    penalty = 0.1 * (logits.logsumexp(-1).square() * weights.abs()).sum()
    torch.testing.assert_close(found, each.sum())
    wanted = torch.autograd.grad(each.sum() + penalty, (x, weight))
    torch.testing.assert_close(torch.autograd.grad(found, (x, weight)), wanted)
