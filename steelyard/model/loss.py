"""The head's matrix product and the cross entropy in one, chunk by chunk, so that full logits never exist.

The gradients are computed together with the loss: a chunk's logits are turned into their own gradient and multiplied
back at once, so nothing is computed twice and only the gradients of stream and weight are kept.

Tensor suffixes: N tokens, D hidden, V rows of the vocabulary held here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 30  # of fp32 logits


class WholeVocabulary:
    """The usual case: this process holds all rows of the head. With tensor parallelism others hold some."""

    first_row = 0

    def enter(self, x_BLD: Tensor) -> Tensor:
        """What the stream goes through before the head."""
        return x_BLD

    def largest(self, value_N: Tensor) -> Tensor:
        """The largest over all holders of rows."""
        return value_N

    def total(self, value: Tensor) -> Tensor:
        """The sum over all holders of rows."""
        return value


def linear_cross_entropy(
    x_BLD: Tensor,
    weight_VD: Tensor,
    labels_BL: Tensor,
    weights_BL: Tensor | None,
    vocab: int,
    vocabulary: WholeVocabulary,
) -> Tensor:
    """The sum over all tokens of weight x cross entropy, in fp32. Rows beyond `vocab` only pad and are left out."""
    weights_N = None if weights_BL is None else weights_BL.flatten()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_BLD.flatten(0, 1), weight_VD, labels_BL.flatten(), weights_N, vocab, vocabulary
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
        vocabulary: WholeVocabulary,
    ) -> Tensor:
        real_rows = min(max(vocab - vocabulary.first_row, 0), weight_VD.shape[0])
        head_VD = weight_VD[:real_rows].to(x_ND.dtype)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_ND) if needs_x else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        # Counted by all rows, not by the real ones, of which ranks have different numbers: their chunks must be alike.
        rows = max(1, CHUNK_BYTES // (4 * len(weight_VD)))
        for first in range(0, len(x_ND), rows):
            part = slice(first, first + rows)
            weights = None if weights_N is None else weights_N[part]
            logits = _product(x_ND[part], head_VD.t())
            if x_ND.is_cuda and isinstance(vocabulary, WholeVocabulary) and type(vocabulary) is WholeVocabulary:
                chunk_loss, grad = _compiled_chunk()(logits, labels_N[part], weights, x_ND.dtype)
            else:
                chunk_loss, grad = _chunk(logits, labels_N[part], weights, vocabulary, x_ND.dtype)
            loss += chunk_loss
            if grad_x is not None:
                torch.mm(grad, head_VD, out=grad_x[part])
            if grad_weight is not None:
                _add_product(grad_weight[:real_rows], grad.t(), x_ND[part])
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * grad_loss.to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None


def _chunk(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor | None, vocabulary: WholeVocabulary, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A chunk's loss, and the gradient of its logits, to which the logits themselves give way."""
    logits_NV = logits_NV.float()
    rows = logits_NV.shape[1]
    place_N = labels_N - vocabulary.first_row
    is_here_N = (place_N >= 0) & (place_N < rows)
    place_N = place_N.clamp(0, max(rows - 1, 0))
    if rows:
        largest_N = vocabulary.largest(logits_NV.amax(dim=1))
        label_logit_N = torch.where(is_here_N, logits_NV.gather(1, place_N[:, None])[:, 0], 0.0)
    else:
        largest_N = vocabulary.largest(torch.full_like(labels_N, -torch.inf, dtype=torch.float32))
        label_logit_N = torch.zeros_like(largest_N)
    powers_NV = (logits_NV - largest_N[:, None]).exp()
    sums_N, label_logit_N = vocabulary.total(torch.stack([powers_NV.sum(dim=1), label_logit_N]))
    losses_N = sums_N.log() + largest_N - label_logit_N
    grad_NV = powers_NV / sums_N[:, None]
    if rows:
        grad_NV.scatter_add_(1, place_N[:, None], -is_here_N[:, None].to(grad_NV.dtype))
    if weights_N is not None:
        losses_N = losses_N * weights_N
        grad_NV = grad_NV * weights_N[:, None]
    return losses_N.sum(), grad_NV.to(dtype)


def _chunk_here(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`_chunk` for all rows in one place, written so that a compiler makes it two passes over the logits."""
    logits_NV = logits_NV.float()
    sums_N = torch.logsumexp(logits_NV, dim=1)
    losses_N = sums_N - logits_NV.gather(1, labels_N[:, None])[:, 0]
    columns_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    grad_NV = (logits_NV - sums_N[:, None]).exp() - (columns_V == labels_N[:, None]).float()
    if weights_N is not None:
        losses_N = losses_N * weights_N
        grad_NV = grad_NV * weights_N[:, None]
    return losses_N.sum(), grad_NV.to(dtype)


_compiled: Any = None


def _compiled_chunk() -> Any:
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(_chunk_here, dynamic=False)
    return _compiled


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; a GPU can keep the sum's fp32 instead of rounding it to the factors' dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the total being fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += (a @ b).float()
