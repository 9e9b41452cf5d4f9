"""Modules that compute in the precision of what flows through them.

Weights stay fp32 wherever they live; a module brings them to the dtype of its input when it uses them. So precision is
decided in one place, where the stream begins, and the same module serves fp32, bf16 and fp16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """A matrix product, in the dtype of its input or, when `product` is replaced, in another arithmetic."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    part = (0, 0, 1)
    """Dimension, index and number when this process holds one of several equal pieces of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.product(x, self.weight.to(x.dtype), bias)


class RmsNorm(nn.Module):
    """x / rms(x), scaled per channel; computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / deviation, scaled and shifted per channel; computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)
