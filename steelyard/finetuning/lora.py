"""Adapters: small matrices that learn beside frozen ones.

LoRA computes W + s B A with s = alpha / rank, A (rank x in) random and B (out x rank) zero, so that training begins at
the base. DoRA also learns the length of each row: g (W + s B A) / |W + s B A|, g beginning at the rows' lengths, which
are taken for constants when gradients are computed. Both are what PEFT computes, so both can be read there.

Over a pruned model LoRA may keep its zeros: m * (W + s B A), where m is where W is not zero. PEFT has nothing like it.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.core.errors import UserError
from steelyard.core.recipe.finetune_section import AdapterSection
from steelyard.core.recipe.finetune_section import Linear as Target
from steelyard.model import LanguageModel
from steelyard.model.modules import Linear, product
from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT, MAGNITUDE

NAMES = (ADAPTER_IN, ADAPTER_OUT, MAGNITUDE)


class AdaptedLinear(Linear):
    """A frozen product and what is learned on top of it."""

    axis: MeshAxis | None = None
    """The ranks that hold the other pieces of it."""

    def __init__(self, linear: Linear, adapter: AdapterSection, keeps_zeros: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.keeps_zeros = adapter.alpha / adapter.rank, keeps_zeros
        device = linear.weight.device
        self.adapter_in = nn.Parameter(torch.empty(adapter.rank, linear.in_features, device=device))
        self.adapter_out = nn.Parameter(torch.empty(linear.out_features, adapter.rank, device=device))
        if adapter.kind == "dora":
            self.magnitude = nn.Parameter(torch.empty(linear.out_features, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """The frozen product and the adapter's."""
        if self.keeps_zeros:
            added = self.adapter_out.to(x.dtype) @ self.adapter_in.to(x.dtype) * self.scale
            return self.product(x, self.weight.to(x.dtype) + added.where(self.weight != 0, 0.0), self.bias)
        added = product(product(x, self.adapter_in, None), self.adapter_out, None) * self.scale
        if not hasattr(self, "magnitude"):
            return self.product(x, self.weight, self.bias) + added
        stretch = (self.magnitude / self.lengths()).to(x.dtype)
        output = (self.product(x, self.weight, None) + added) * stretch
        return output if self.bias is None else output + self.bias.to(x.dtype)

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """The length of each row of the adapted matrix; ranks that hold other columns of it add theirs."""
        squares = self.merged_direction().square().sum(dim=1)
        if self.axis is not None and self.part[0] == 1:
            dist.all_reduce(squares, group=self.axis.group)
        return squares.sqrt()

    def merged_direction(self) -> Tensor:
        """The matrix with what was learned added."""
        return self.weight.float() + self.scale * (self.adapter_out.float() @ self.adapter_in.float())


def put_adapters(model: LanguageModel, adapter: AdapterSection, keeps_zeros: bool = False) -> None:
    """Freeze a model and give its layers' matrices adapters, which may leave zeros as they are."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.to(model.dtype)
    model.requires_grad_(False)
    model.tie()
    found = {path.rpartition(".")[2] for layer in model.layers.values() for path, _ in layer.named_modules()}
    if model.layers and not found & set(adapter.targets):
        raise UserError(
            f"no matrix of this family is called {' or '.join(adapter.targets)}",
            hint=f"choose finetune.adapter.targets among {', '.join(sorted(found & set(get_args(Target))))}",
        )
    for layer in model.layers.values():
        for path, linear in list(layer.named_modules()):
            parent, _, name = path.rpartition(".")
            if name in adapter.targets and isinstance(linear, Linear):
                setattr(layer.get_submodule(parent), name, AdaptedLinear(linear, adapter, keeps_zeros))


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in NAMES


def merged(weight: Tensor, learned: dict[str, Tensor], scale: float, keeps_zeros: bool = False) -> Tensor:
    """A matrix with its adapter folded in, in fp32."""
    total = weight.float() + scale * (learned[ADAPTER_OUT].float() @ learned[ADAPTER_IN].float())
    if MAGNITUDE in learned:
        total = total * (learned[MAGNITUDE].float() / total.norm(dim=1))[:, None]
    return total.where(weight != 0, 0.0) if keeps_zeros else total
