"""The MLP of a transformer layer. Tensor suffixes: B batch, L length, D hidden."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.core.recipe.blocks import MlpBlock
from steelyard.model.modules import Linear


def activated(x: Tensor, activation: str) -> Tensor:
    """SiLU, or GPT-2's approximation of GELU."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


class Mlp(nn.Module):
    """Two projections with an activation between them, or three if it is gated."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, block: MlpBlock) -> None:
        super().__init__()
        self.block = block
        for name, (rows, columns) in block.matrices().items():
            self.add_module(name, Linear(columns, rows, bias=block.bias))

    def forward(self, x_BLD: Tensor) -> Tensor:
        inner = (
            activated(self.gate(x_BLD), self.block.activation) * self.up(x_BLD)
            if self.block.gated
            else activated(self.up(x_BLD), self.block.activation)
        )
        output: Tensor = self.down(inner)
        return output
