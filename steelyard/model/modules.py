"""Modules that compute in the precision of what flows through them.

Weights stay fp32 wherever they live; a module brings them to the dtype of its input when it uses them. So precision is
decided in one place, where the stream begins, and the same module serves fp32, bf16 and fp16.

Tensor suffixes: B batch, L length, N places of a row, D hidden, T all those tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def at_places(places_BN: Tensor, x_BLD: Tensor) -> Tensor:
    """The stream at some of each row's places."""
    rows, length, _ = x_BLD.shape
    places_T = (places_BN + length * torch.arange(rows, device=places_BN.device)[:, None]).flatten()
    x_TD = x_BLD.flatten(0, 1).index_select(0, places_T)
    return x_TD.view(*places_BN.shape, -1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in the dtype of x, whatever that of weight and bias."""
    is_mixed = x.is_cuda and weight.dtype == torch.float32 != x.dtype and weight.requires_grad
    # Zero bubble, which is not compiled, wants the two gradients one without the other: autograd's own product can.
    if is_mixed and torch.compiler.is_compiling():
        y: Tensor = _LinearFunction.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _LinearFunction(torch.autograd.Function):
    """The same, but the gradients of weight and bias leave their sums in fp32, without a rounding to 16 bits between.

    That saves reading and writing them once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = weight.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        return F.linear(x, rounded, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        rows = grad.flatten(0, -2)
        grad_weight = torch.mm(rows.t(), x.flatten(0, -2), out_dtype=torch.float32)
        return grad_x, grad_weight, rows.sum(dim=0, dtype=torch.float32) if needs_bias else None


class Linear(nn.Linear):
    """A matrix product, in the dtype of its input or, when `product` is replaced, in another arithmetic."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(product)
    part = (0, 0, 1)
    """Dimension, index and number when this process holds one of several equal pieces of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


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
