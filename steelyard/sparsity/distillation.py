"""Distillation from the dense model in mask learning: adds the KL divergence from its predictions to the loss.

The dense model is the same frozen weights without masks. It costs one more forward pass, and memory only for its last
hidden states. The divergence sum_v p(v) (log p(v) - log q(v)), p the dense model's predictions and q the masked one's,
both at a temperature T and the whole times T^2, is computed in chunks together with its gradient, so that full logits
never exist. Tensor-parallel ranks compute it over their own rows of the vocabulary. With a pipeline the dense model
computes all micro-batches of a step first. The loss in the records does not include the divergence: that remains the
loss on the text.

Tensor suffixes: B batch, L length, N tokens, D hidden, V rows of the vocabulary held here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steelyard.model import Batch, LanguageModel
from steelyard.model.loss import VocabHead, linear_cross_entropy, softcapped
from steelyard.parallel.pipeline_parallel import Pipeline
from steelyard.sparsity.masked_linear import Course

CHUNK_BYTES = 1 << 28  # of logits in fp32


class Distilling:
    """A forward pass that runs the dense model first, and adds the divergence from it to the loss."""

    def __init__(self, course: Course, weight: float, temperature: float) -> None:
        self.course, self.weight, self.temperature = course, weight, temperature
        self.dense: deque[Tensor] = deque()
        """The last hidden states of the dense model, for the next micro-batches."""
        self.sums_2 = torch.zeros(2, dtype=torch.float64, device=course.candidates_CM.device)
        """Divergence and tokens since the last record."""

    def __call__(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Run the dense model and keep its last hidden states for the loss, then run the masked model."""
        # The divergence ignores loss weights: every token counts.
        batch = batch.replace(loss_positions_BK=None)
        with self._dense_model(model):
            model(batch.replace(sample_ids_B=None))  # Without sample ids there is no dropout.
        model.loss = self._loss_and_divergence
        try:
            loss: Tensor = model(batch)
            return loss
        finally:
            self.end(model)

    def prepare(self, pipeline: Pipeline, batch: Batch, micro_batch: int) -> Batch:
        """Run the dense model on all micro-batches of a step. `end` restores the loss."""
        batch = batch.replace(loss_positions_BK=None)
        last = next((model for model in pipeline.models.values() if model.part.last), None)
        with self._dense_model(last):
            pipeline.evaluate(batch.replace(sample_ids_B=None).micro_batches(micro_batch))
        if last is not None:
            last.loss = self._loss_and_divergence
        return batch

    def end(self, model: LanguageModel) -> None:
        """Restore the loss of a model."""
        model.loss = linear_cross_entropy
        self.dense.clear()

    @contextmanager
    def _dense_model(self, model: LanguageModel | None) -> Iterator[None]:
        """Compute without masks, and keep the input of the head instead of a loss."""
        self.dense.clear()
        self.course.dense = True
        if model is not None:
            model.loss = self._store_dense
        try:
            with torch.no_grad():
                yield
        finally:
            self.course.dense = False

    def _store_dense(self, x_BLD: Tensor, *others: Any) -> Tensor:
        self.dense.append(x_BLD)
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
        loss = linear_cross_entropy(x_BLD, weight_VD, labels_BL, loss_weights_BL, vocab, vocabulary, softcap, z_loss)
        dense_BLD = self.dense.popleft()
        distance = divergence(x_BLD, dense_BLD, weight_VD, vocab, self.temperature, softcap, vocabulary)
        self.sums_2 += torch.stack([distance.detach().double(), torch.full_like(distance, labels_BL.numel()).double()])
        return loss + self.weight * (distance - distance.detach())


def divergence(
    x_BLD: Tensor,
    dense_BLD: Tensor,
    head_VD: Tensor,
    vocab: int,
    temperature: float,
    softcap: float | None = None,
    vocabulary: VocabHead | None = None,
) -> Tensor:
    """The KL divergence of the predictions from the dense model's, summed over tokens, in nats."""
    total: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        x_BLD.flatten(0, 1), dense_BLD.flatten(0, 1), head_VD, vocab, temperature, softcap, vocabulary or VocabHead()
    )
    return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        dense_ND: Tensor,
        head_VD: Tensor,
        vocab: int,
        temperature: float,
        softcap: float | None,
        vocabulary: VocabHead,
    ) -> Tensor:
        head = head_VD.to(x_ND.dtype)
        real_rows = min(max(vocab - vocabulary.first_row, 0), len(head))
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        grad_x = torch.empty_like(x_ND)
        rows = max(1, CHUNK_BYTES // (4 * len(head)))
        for first in range(0, len(x_ND), rows):
            part = slice(first, first + rows)
            logits, dense_logits = (each[part] @ head.t() for each in (x_ND, dense_ND))
            slopes = None
            if softcap is not None:
                logits, dense_logits = (softcapped(each.float(), softcap) for each in (logits, dense_logits))
                slopes = 1 - (logits / softcap).square()
            if x_ND.is_cuda and type(vocabulary) is VocabHead:
                from steelyard.sparsity.divergence_kernel import fused_divergence

                divergence_N, grad = fused_divergence(logits, dense_logits, real_rows, temperature)
            else:
                divergence_N, grad = token_divergence(logits, dense_logits, real_rows, temperature, vocabulary)
            total += divergence_N.sum()
            if slopes is not None:
                grad = grad * slopes
            torch.mm(grad.to(x_ND.dtype), head, out=grad_x[part])
        ctx.save_for_backward(grad_x)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), *[None] * 6


def token_divergence(
    logits_NV: Tensor, dense_NV: Tensor, real_rows: int, temperature: float, vocabulary: VocabHead
) -> tuple[Tensor, Tensor]:
    """The divergence of each token, and its gradient for the logits. Rows after `real_rows` are padding."""
    scaled = torch.stack([logits_NV, dense_NV]).float() / temperature
    scaled[..., real_rows:] = -torch.inf
    largest = vocabulary.largest(scaled.amax(dim=-1))
    powers = (scaled - largest[..., None]).exp()
    sums = vocabulary.total(powers.sum(dim=-1))
    masked_NV, dense_NV = powers / sums[..., None]
    constants_N = (largest[0] + sums[0].log()) - (largest[1] + sums[1].log())
    ratios_NV = scaled[1] - scaled[0] + constants_N[:, None]
    terms_NV = (dense_NV * ratios_NV)[:, :real_rows]
    divergence_N = temperature**2 * vocabulary.total(terms_NV.sum(dim=-1))
    return divergence_N, temperature * (masked_NV - dense_NV)
