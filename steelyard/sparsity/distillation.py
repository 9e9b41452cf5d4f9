"""Distillation from the dense model in mask learning: adds the KL divergence from its predictions to the loss.

The dense model is the same frozen weights without masks. It costs one more forward pass, and memory only for its last
hidden states. The divergence sum_v p(v) (log p(v) - log q(v)), p the dense model's predictions and q the masked one's,
both at a temperature T and the whole times T^2, is computed in chunks together with its gradient, so that full logits
never exist. The loss in the records does not include it: that remains the loss on the text.

Tensor suffixes: N tokens, D hidden, V rows of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.model import Batch, LanguageModel
from steelyard.model.loss import VocabHead, linear_cross_entropy, softcapped
from steelyard.sparsity.masked_linear import Course

CHUNK_BYTES = 1 << 28  # of logits in fp32


class Distilling:
    """A forward pass that runs the dense model first, and adds the divergence from it to the loss."""

    def __init__(self, course: Course, weight: float, temperature: float) -> None:
        self.course, self.weight, self.temperature = course, weight, temperature
        self.dense_BLD: Tensor | None = None
        self.sums_2 = torch.zeros(2, dtype=torch.float64, device=course.candidates_CM.device)
        """Divergence and tokens since the last record."""

    def __call__(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Run the dense model and keep its last hidden states for the loss, then run the masked model."""
        # The divergence ignores loss weights: every token counts.
        batch = batch.replace(loss_positions_BK=None)
        self.course.dense, model.loss = True, self._store_dense
        try:
            with torch.no_grad():
                model(batch.replace(sample_ids_B=None))  # Without sample ids there is no dropout.
        finally:
            self.course.dense, model.loss = False, self._loss_and_divergence
        try:
            loss: Tensor = model(batch)
            return loss
        finally:
            model.loss, self.dense_BLD = linear_cross_entropy, None

    def _store_dense(self, x_BLD: Tensor, *others: Any) -> Tensor:
        self.dense_BLD = x_BLD
        return x_BLD.new_zeros(())

    def _loss_and_divergence(
        self,
        x_BLD: Tensor,
        weight_VD: Tensor,
        labels_BL: Tensor,
        loss_weights_BL: Tensor | None,
        vocab: int,
        vocabulary: VocabHead,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        assert self.dense_BLD is not None
        loss = linear_cross_entropy(x_BLD, weight_VD, labels_BL, loss_weights_BL, vocab, vocabulary, softcap, z_loss)
        distance = divergence(x_BLD, self.dense_BLD, weight_VD, vocab, self.temperature, softcap)
        self.sums_2 += torch.stack([distance.detach().double(), torch.full_like(distance, labels_BL.numel()).double()])
        return loss + self.weight * (distance - distance.detach())


def divergence(
    x_BLD: Tensor, dense_BLD: Tensor, head_VD: Tensor, vocab: int, temperature: float, softcap: float | None = None
) -> Tensor:
    """The KL divergence of the predictions from the dense model's, summed over tokens, in nats."""
    total: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        x_BLD.flatten(0, 1), dense_BLD.flatten(0, 1), head_VD, vocab, temperature, softcap
    )
    return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, dense_ND: Tensor, head_VD: Tensor, vocab: int, temperature: float, softcap: float | None
    ) -> Tensor:
        head = head_VD[:vocab].to(x_ND.dtype)
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        grad_x = torch.empty_like(x_ND)
        rows = max(1, CHUNK_BYTES // (4 * vocab))
        for first in range(0, len(x_ND), rows):
            part = slice(first, first + rows)
            logits, dense_logits = ((each[part] @ head.t()).float() for each in (x_ND, dense_ND))
            if softcap is not None:
                logits, dense_logits = softcapped(logits, softcap), softcapped(dense_logits, softcap)
            masked, dense = (F.log_softmax(each / temperature, dim=1) for each in (logits, dense_logits))
            probabilities = dense.exp()
            total += temperature**2 * (probabilities * (dense - masked)).sum()
            grad = temperature * (masked.exp() - probabilities)
            if softcap is not None:
                grad = grad * (1 - (logits / softcap).square())
            torch.mm(grad.to(x_ND.dtype), head, out=grad_x[part])
        ctx.save_for_backward(grad_x)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), None, None, None, None, None
