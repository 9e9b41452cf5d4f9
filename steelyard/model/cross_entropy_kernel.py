"""Cross entropy as one Triton kernel: two passes over a row of logits, which the gradient overwrites.

`steelyard.model.loss.cross_entropy` is the specification; tests compare this kernel with it. This module is imported
only on a GPU, because other machines may not have Triton.

Tensor suffixes: N tokens, V rows of the head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def fused_cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor | None, real_rows: int, with_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """The weighted loss of each token. With `with_gradient` the gradient overwrites the logits."""
    losses_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    _kernel[(len(logits_NV),)](
        logits_NV, labels_N, losses_N if weights_N is None else weights_N.float(), losses_N,
        logits_NV.shape[1], real_rows, weights_N is not None, with_gradient, BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses_N, logits_NV


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits, labels, weights, losses, width, real,
    has_weights: tl.constexpr, has_gradient: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    label = tl.load(labels + row)
    # Load before any store: the reductions below are barriers.
    label_logit = tl.load(logits + label).to(tl.float32)
    largest = -float("inf")
    total = 0.0
    for first in range(0, real, block):
        columns = first + tl.arange(0, block)
        x = tl.load(logits + columns, mask=columns < real, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
        largest = new_largest
    log_total = largest + tl.log(total)
    weight = tl.load(weights + row) if has_weights else 1.0
    tl.store(losses + row, (log_total - label_logit) * weight)
    if has_gradient:
        for first in range(0, width, block):
            columns = first + tl.arange(0, block)
            x = tl.load(logits + columns, mask=columns < real, other=-float("inf")).to(tl.float32)
            gradient = (tl.exp(x - log_total) - (columns == label).to(tl.float32)) * weight
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < width)
