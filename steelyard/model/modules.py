"""Modules that compute in the dtype of their input.

Weights stay in fp32; a module casts them to the dtype of its input when it uses them. So the embedding output alone
decides the precision, and the same module supports fp32, bf16 and fp16.

Tensor suffixes: B batch, L length, N selected positions of a row, D hidden, T all selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def at_positions(positions_BN: Tensor, x_BLD: Tensor) -> Tensor:
    """The rows of `x_BLD` at the given positions."""
    rows, length, _ = x_BLD.shape
    positions_T = (positions_BN + length * torch.arange(rows, device=positions_BN.device)[:, None]).flatten()
    x_TD = x_BLD.flatten(0, 1).index_select(0, positions_T)
    return x_TD.view(*positions_BN.shape, -1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, with weight and bias cast to the dtype of x."""
    is_mixed = x.is_cuda and weight.dtype == torch.float32 != x.dtype and weight.requires_grad
    # Zero bubble, which is not compiled, computes the two gradients separately: only autograd's own product can.
    if is_mixed and torch.compiler.is_compiling():
        y: Tensor = _LinearFunction.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _LinearFunction(torch.autograd.Function):
    """The same product, but the gradients of weight and bias are fp32 and not rounded to 16 bits in between.

    This saves one read and one write of the gradients.
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


def is_inference(x: Tensor) -> bool:
    """Whether `inference_kernels.py` may compute this: on a GPU, without gradients, and not compiled."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


class Linear(nn.Linear):
    """A linear layer in the dtype of its input. Replace `product` to use another arithmetic."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(product)
    shard = (0, 0, 1)
    """Dimension, index and number of shards, if this process holds one of several equal shards of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    """x / rms(x), scaled per channel; computed in fp32. The scale is `weight`, or 1 + `offset`."""

    weight: nn.Parameter
    offset: nn.Parameter

    def __init__(self, width: int, eps: float, is_offset: bool = False) -> None:
        super().__init__()
        self.register_parameter("offset" if is_offset else "weight", nn.Parameter(torch.empty(width)))
        self.is_offset, self.eps = is_offset, eps

    def forward(self, x: Tensor) -> Tensor:
        if is_inference(x):
            from steelyard.model.inference_kernels import rms_norm

            return rms_norm(x, self.offset if self.is_offset else self.weight, self.eps, self.is_offset)
        weight: Tensor = self.offset.float() + 1 if self.is_offset else self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / deviation, scaled and shifted per channel; computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)
