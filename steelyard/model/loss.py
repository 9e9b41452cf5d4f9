"""The head's matrix product fused with the cross entropy, in chunks, so that the full logits are never in memory.

The gradients are computed together with the loss: the gradient overwrites the logits of a chunk and is multiplied back
at once. So nothing is computed twice, and only the gradients of input and weight are kept.

Tensor suffixes: B batch, L length, N tokens, D hidden, V rows of the vocabulary held here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 31  # of logits
# Without gradients, chunks on a CPU are small enough for its cache.
CACHE_BYTES = 1 << 24


class VocabHead:
    """A head whose rows are all in this process. Under tensor parallelism `VocabParallelHead` replaces it."""

    first_row = 0
    by_sequence = False
    """Whether the input of the head is sharded along the sequence."""

    def enter(self, x_BLD: Tensor) -> Tensor:
        """Prepare the input of the head."""
        return x_BLD

    def largest(self, value_N: Tensor) -> Tensor:
        """The maximum over all ranks that hold rows."""
        return value_N

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks that hold rows."""
        return value


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Logits between -softcap and softcap."""
    return softcap * torch.tanh(logits / softcap)


def linear_cross_entropy(
    x_BLD: Tensor,
    weight_VD: Tensor,
    labels_BL: Tensor,
    loss_weights_BL: Tensor | None,
    vocab: int,
    vocabulary: VocabHead,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """The sum over all tokens of weight x cross entropy, in fp32. Rows beyond `vocab` are padding and are ignored.

    With `softcap` the logits are softcap * tanh(logits / softcap). `z_loss` adds the gradient of z_loss x (log of the
    sum of the logits' exponentials)^2, but not its value, so that losses stay comparable.
    """
    weights_N = None if loss_weights_BL is None else loss_weights_BL.flatten()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_BLD.flatten(0, 1), weight_VD, labels_BL.flatten(), weights_N, vocab, vocabulary, softcap, z_loss
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
        vocab: int,
        vocabulary: VocabHead,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        # Padding rows are multiplied, because round sizes are faster, and then ignored.
        real_rows = min(max(vocab - vocabulary.first_row, 0), weight_VD.shape[0])
        head_VD = weight_VD.to(x_ND.dtype)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_ND) if needs_x else None
        grad_weight: Tensor | None = None
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        needs_grad = needs_x or needs_weight
        chunk = CHUNK_BYTES if needs_grad or x_ND.is_cuda else CACHE_BYTES
        # Count all rows, not the real ones, whose number differs between ranks: all ranks need the same chunks.
        rows = max(1, chunk // (x_ND.element_size() * len(head_VD)))
        for first in range(0, len(x_ND), rows):
            part = slice(first, first + rows)
            weights = None if weights_N is None else weights_N[part]
            logits = x_ND[part] @ head_VD.t()
            slopes = None
            if softcap is not None:
                logits.div_(softcap).tanh_()
                slopes = 1 - logits.square() if needs_grad else None
                logits.mul_(softcap)
            if x_ND.is_cuda and type(vocabulary) is VocabHead and not z_loss:
                from steelyard.model.cross_entropy_kernel import fused_cross_entropy

                losses, grad = fused_cross_entropy(logits, labels_N[part], weights, real_rows, needs_grad)
            elif needs_grad:
                losses, grad = cross_entropy(logits, labels_N[part], weights, real_rows, vocabulary, z_loss)
            else:
                losses = cross_entropy_alone(logits, labels_N[part], weights, real_rows, vocabulary)
            loss += losses.sum()
            if slopes is not None:
                grad.mul_(slopes)
            if grad_x is not None:
                torch.mm(grad, head_VD, out=grad_x[part])
            if needs_weight:
                grad_weight = add_product(grad_weight, grad.t(), x_ND[part])
            del logits, slopes  # Free this chunk before the next one is computed.
            if needs_grad:
                del grad
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * grad_loss.to(grad_x.dtype)
        if grad_weight is not None:
            (grad_weight,) = torch._foreach_mul([grad_weight], grad_loss)  # Runs at memory bandwidth; `*` is slower.
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None, None


def cross_entropy(
    logits_NV: Tensor,
    labels_N: Tensor,
    weights_N: Tensor | None,
    real_rows: int,
    vocabulary: VocabHead,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The weighted loss of each token, and the gradient of its logits. Rows after `real_rows` are padding."""
    dtype = logits_NV.dtype
    losses_N, powers_NV, sums_N, largest_N, local_N, is_local_N = _softmax_terms(
        logits_NV, labels_N, real_rows, vocabulary
    )
    grad_NV = powers_NV / sums_N[:, None]
    if z_loss:  # Its weight is positive where that of the loss is negative, as in DPO.
        sign_N = 1 if weights_N is None else weights_N.sign()
        grad_NV = grad_NV * (1 + 2 * z_loss * sign_N * (sums_N.log() + largest_N))[:, None]
    grad_NV.scatter_add_(1, local_N[:, None], -is_local_N[:, None].to(grad_NV.dtype))
    if weights_N is not None:
        losses_N = losses_N * weights_N
        grad_NV = grad_NV * weights_N[:, None]
    return losses_N, grad_NV.to(dtype)


def cross_entropy_alone(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor | None, real_rows: int, vocabulary: VocabHead
) -> Tensor:
    """The weighted loss of each token, without the gradient."""
    losses_N, *_ = _softmax_terms(logits_NV, labels_N, real_rows, vocabulary)
    return losses_N if weights_N is None else losses_N * weights_N


def _softmax_terms(
    logits_NV: Tensor, labels_N: Tensor, real_rows: int, vocabulary: VocabHead
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss of each token, and the terms of its softmax and label from which the gradient is computed."""
    logits_NV = logits_NV.float()
    logits_NV[:, real_rows:] = -torch.inf
    local_N = labels_N - vocabulary.first_row
    is_local_N = (local_N >= 0) & (local_N < real_rows)
    local_N = local_N.where(is_local_N, 0)
    largest_N = vocabulary.largest(logits_NV.amax(dim=1))
    label_logit_N = logits_NV.gather(1, local_N[:, None])[:, 0].where(is_local_N, 0.0)
    powers_NV = (logits_NV - largest_N[:, None]).exp_()
    sums_N, label_logit_N = vocabulary.total(torch.stack([powers_NV.sum(dim=1), label_logit_N]))
    losses_N = sums_N.log() + largest_N - label_logit_N
    return losses_N, powers_NV, sums_N, largest_N, local_N, is_local_N


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in fp32, in place if there is a total."""
    if a.is_cuda and a.dtype != torch.float32:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == torch.float32 else total.add_((a @ b).float())
