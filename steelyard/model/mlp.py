"""The MLP of a transformer layer. Tensor suffixes: B batch, L length, D hidden."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.core.recipe.blocks import MlpBlock
from steelyard.model.modules import Linear, is_inference


def activated(x: Tensor, activation: str) -> Tensor:
    """SiLU, or GPT-2's approximation of GELU."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of `gate` times `up`."""
    if is_inference(gate):
        from steelyard.model import inference_kernels

        return inference_kernels.gated(gate, up, activation)
    return activated(gate, activation) * up


class Mlp(nn.Module):
    """Two projections with an activation between them, or three if it is gated."""

    gate: Linear
    up: Linear
    down: Linear
    joined: Linear | None
    """Gate and up as one product (`evaluate/join_projections.py`)."""

    def __init__(self, block: MlpBlock) -> None:
        super().__init__()
        self.block = block
        self.register_module("joined", None)
        for name, (rows, columns) in block.matrices().items():
            self.add_module(name, Linear(columns, rows, bias=block.bias))

    def forward(self, x_BLD: Tensor) -> Tensor:
        if not self.block.gated:
            inner = activated(self.up(x_BLD), self.block.activation)
        elif self.joined is None:
            inner = gated(self.gate(x_BLD), self.up(x_BLD), self.block.activation)
        else:
            gate, up = self.joined(x_BLD).chunk(2, dim=-1)
            inner = gated(gate, up, self.block.activation)
        output: Tensor = self.down(inner)
        return output
