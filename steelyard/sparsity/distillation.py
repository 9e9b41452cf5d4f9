"""Distillation from the dense model: adds the KL divergence from its predictions to the loss.

In mask learning the dense model is the same frozen weights without masks. It costs one more forward pass, and memory
only for its last hidden states. Where the weights change (`joint_training.py`), it is a frozen copy on the same layout.
The divergence sum_v p(v) (log p(v) - log q(v)), p the dense model's predictions and q the masked one's,
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
import torch.distributed as dist
from torch import Tensor

from steelyard.model import Batch, LanguageModel
from steelyard.model.loss import VocabHead, add_product, linear_cross_entropy, softcapped
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.parallelize import ParallelModel
from steelyard.parallel.pipeline_parallel import Pipeline
from steelyard.parallel.world import World
from steelyard.sparsity.masked_linear import AnnealState
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

CHUNK_BYTES = 1 << 28  # of logits in fp32


class DistillationLoss:
    """A forward pass that runs the dense model first, and adds the divergence from it to the loss.

    The dense model is `teacher`, or the trained model while `anneal` switches its masks off.
    """

    def __init__(
        self,
        weight: float,
        temperature: float,
        device: torch.device,
        anneal: AnnealState | None = None,
        teacher: ParallelModel | None = None,
    ) -> None:
        self.weight, self.temperature, self.anneal, self.teacher = weight, temperature, anneal, teacher
        self.dense: deque[tuple[Tensor, Tensor]] = deque()
        """The last hidden states of the dense model and its head, for the next micro-batches."""
        self.sums_2 = torch.zeros(2, dtype=torch.float64, device=device)
        """Divergence and tokens since the last record."""

    def __call__(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Run the dense model and keep its last hidden states for the loss, then run the masked model."""
        # The divergence ignores loss weights: every token counts.
        batch = batch.replace(loss_positions_BK=None)
        dense = model if self.teacher is None else self.teacher.model
        with self._dense_model(dense):
            dense(batch.replace(sample_ids_B=None))  # Without sample ids there is no dropout.
        model.loss = self._loss_and_divergence
        try:
            loss: Tensor = model(batch)
            return loss
        finally:
            self.end(model)

    def prepare(self, pipeline: Pipeline, batch: Batch, micro_batch: int) -> Batch:
        """Run the dense model on all micro-batches of a step. `end` restores the loss."""
        batch = batch.replace(loss_positions_BK=None)
        dense = pipeline if self.teacher is None or self.teacher.pipeline is None else self.teacher.pipeline
        with self._dense_model(_last_stage(dense)):
            dense.evaluate(batch.replace(sample_ids_B=None).micro_batches(micro_batch))
        last = _last_stage(pipeline)
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
        if self.anneal is not None:
            self.anneal.dense = True
        if model is not None:
            model.loss = self._store_dense
        try:
            with torch.no_grad():
                yield
        finally:
            if self.anneal is not None:
                self.anneal.dense = False

    def _store_dense(self, x_BLD: Tensor, weight_VD: Tensor, *others: Any) -> Tensor:
        self.dense.append((x_BLD, weight_VD))
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
        dense_BLD, dense_VD = self.dense.popleft()
        heads = (weight_VD, weight_VD if self.teacher is None else dense_VD)
        distance = divergence(x_BLD, dense_BLD, heads, vocab, self.temperature, softcap, vocabulary)
        self.sums_2 += torch.stack([distance.detach().double(), torch.full_like(distance, labels_BL.numel()).double()])
        return loss + self.weight * (distance - distance.detach())


class DistillationExtension(Extension):
    """An extension whose loss includes the divergence from the dense model, once `distillation` is set."""

    distillation: DistillationLoss | None = None

    def forward(self, model: LanguageModel, batch: Batch) -> Tensor:
        """The loss, with distillation from the dense model if the recipe sets it."""
        return super().forward(model, batch) if self.distillation is None else self.distillation(model, batch)

    def weigh(self, engine: Engine, batch: Batch) -> tuple[Batch, Tensor | None]:
        """With a pipeline and distillation, run the dense model on all rows of the step."""
        pipeline = engine.parallel_model.pipeline
        if self.distillation is None or pipeline is None:
            return batch, None
        if all(model.training for model in pipeline.models.values()):
            return self.distillation.prepare(pipeline, batch, engine.recipe.train.micro_batch), None
        for model in pipeline.models.values():
            self.distillation.end(model)
        return batch, None

    def distilled(self, mesh: Mesh) -> dict[str, list[float]]:
        """The divergence and tokens since the last record, over all ranks, for the state of a checkpoint."""
        if self.distillation is None:
            return {}
        sums_2 = self.distillation.sums_2.clone()
        if mesh.world.size > 1:
            dist.all_reduce(sums_2)
        return {"distilled": sums_2.tolist()}

    def restore_distilled(self, about: dict[str, Any], world: World) -> None:
        """Take over `distilled` from a checkpoint."""
        if self.distillation is not None and world.is_rank0:
            self.distillation.sums_2.copy_(torch.tensor(about.get("distilled", [0.0, 0.0])))


def _last_stage(pipeline: Pipeline) -> LanguageModel | None:
    return next((model for model in pipeline.models.values() if model.stage_spec.last), None)


def divergence(
    x_BLD: Tensor,
    dense_BLD: Tensor,
    heads: tuple[Tensor, Tensor],
    vocab: int,
    temperature: float,
    softcap: float | None = None,
    vocabulary: VocabHead | None = None,
) -> Tensor:
    """The KL divergence of the predictions from the dense model's, summed over tokens, in nats.

    `heads` are the weights of the head and of the dense model's head.
    """
    total: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        x_BLD.flatten(0, 1), dense_BLD.flatten(0, 1), *heads, vocab, temperature, softcap, vocabulary or VocabHead()
    )
    return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        dense_ND: Tensor,
        head_VD: Tensor,
        dense_VD: Tensor,
        vocab: int,
        temperature: float,
        softcap: float | None,
        vocabulary: VocabHead,
    ) -> Tensor:
        head, dense_head = (each.to(x_ND.dtype) for each in (head_VD, dense_VD))
        real_rows = min(max(vocab - vocabulary.first_row, 0), len(head))
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        grad_x, grad_head = torch.empty_like(x_ND), None
        rows = max(1, CHUNK_BYTES // (4 * len(head)))
        for first in range(0, len(x_ND), rows):
            part = slice(first, first + rows)
            logits, dense_logits = x_ND[part] @ head.t(), dense_ND[part] @ dense_head.t()
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
            grad = grad.to(x_ND.dtype)
            torch.mm(grad, head, out=grad_x[part])
            if ctx.needs_input_grad[2]:
                grad_head = add_product(grad_head, grad.t(), x_ND[part])
        ctx.save_for_backward(grad_x, None if grad_head is None else grad_head.to(head_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = (None if each is None else each * grad.to(each.dtype) for each in ctx.saved_tensors)
        return grad_x, None, grad_head, *[None] * 5


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
