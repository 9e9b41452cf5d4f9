"""The masked model can learn from the dense one: the same weights without masks."""

from types import SimpleNamespace

import pytest
import torch

from steelyard.model import Batch
from steelyard.sparsity import distillation
from tests.sparsity.conftest import Place
from tests.sparsity.test_masked_linear import records

DISTILL = ("sparsity.distill=1.0", "sparsity.distill_temperature=2.0", "log.every=1")


@pytest.mark.parametrize("rows_at_once", [2, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_divergence_and_its_gradient_are_those_of_the_formula(monkeypatch, rows_at_once: int, softcap):
    monkeypatch.setattr(distillation, "CHUNK_BYTES", rows_at_once * 4 * 11)
    torch.manual_seed(0)
    sizes = ((1, 7, 5), (1, 7, 5), (16, 5), (16, 5))
    x, dense, head, dense_head = (torch.randn(*size, dtype=torch.float64) for size in sizes)
    x.requires_grad_()
    head.requires_grad_()
    logits = [each @ weight[:11].t() for each, weight in ((x, head), (dense, dense_head))]
    if softcap is not None:
        logits = [softcap * torch.tanh(each / softcap) for each in logits]
    ours, theirs = ((each / 2).log_softmax(-1) for each in logits)
    expected = 4 * torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum")
    expected.backward()
    mine, own_head = (each.detach().float().requires_grad_() for each in (x, head))
    heads = (own_head, dense_head.float())
    found = distillation.divergence(mine, dense.float(), heads, vocab=11, temperature=2.0, softcap=softcap)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(mine.grad.double(), x.grad, atol=1e-5)
    assert torch.allclose(own_head.grad.double(), head.grad, atol=1e-5)


def test_every_token_is_distilled_wherever_it_stands():
    seen = []

    class Model:
        loss = None

        def __call__(self, batch: Batch) -> torch.Tensor:
            seen.append(set(batch.tensors()))
            return torch.zeros(1)

    anneal = SimpleNamespace(candidates_CM=torch.zeros(6, 4), dense=False)
    batch = Batch(
        torch.zeros(2, 3), torch.zeros(2, 3), loss_positions_BK=torch.zeros(2, 1), sample_ids_B=torch.arange(2)
    )
    distillation.DistillationLoss(1.0, 1.0, torch.device("cpu"), anneal=anneal)(Model(), batch)
    assert seen == [{"tokens_BL", "labels_BL"}, {"tokens_BL", "labels_BL", "sample_ids_B"}]


@pytest.mark.slow
def test_distilling_changes_what_is_learned_and_not_what_the_loss_is(place: Place):
    plain = place.learn("plain", "train.steps=8", "log.every=1")
    run = place.learn("distilled", "train.steps=8", *DISTILL)
    assert records(run, "loss")[0] == pytest.approx(records(plain, "loss")[0], rel=1e-6)
    assert records(run, "loss")[2] != records(plain, "loss")[2]
    apart = records(run, "distill_loss")
    assert all(value > 0 for value in apart)
    again = place.learn("again", "train.steps=8", *DISTILL, "parallel.recompute=full")
    assert records(again, "grad_norm") == records(run, "grad_norm")
