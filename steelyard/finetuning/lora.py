"""LoRA and DoRA: trainable low-rank adapters of frozen matrices.

LoRA computes W + s B A with s = alpha / rank, A (rank x in) random and B (out x rank) zero, so that training starts at
the base model. DoRA also trains the norm of each row: g (W + s B A) / |W + s B A|. g starts at the row norms of W, and
the denominator is a constant in the backward pass. Both are what PEFT computes, so PEFT can load both.

On a pruned model LoRA can keep its zeros: m * (W + s B A), where m is 1 where W is not zero. PEFT has no equivalent.

Every expert has an A and a B of its own (experts x rank x in, experts x out x rank), only for LoRA.

QLoRA stores every W of the layers in 4 or 8 bits (`model/quantized_weight.py`); all of the above then holds for the
dequantized W.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.core.errors import UserError
from steelyard.core.recipe.blocks import ModelBlocks
from steelyard.core.recipe.finetune_section import AdapterSection, BasePrecision
from steelyard.model import LanguageModel
from steelyard.model.experts import MATRIX_MODULES, ExpertLinear
from steelyard.model.modules import Linear, product
from steelyard.model.quantized_weight import QuantizedWeight, quantize_layers
from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT, MAGNITUDE

NAMES = (ADAPTER_IN, ADAPTER_OUT, MAGNITUDE)


class AdaptedLinear(Linear):
    """A frozen linear module with an adapter."""

    axis: MeshAxis | None = None
    """The tensor-parallel ranks that hold the other shards of it."""

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
        """The frozen product plus the adapter's."""
        if self.keeps_zeros:
            added = self.adapter_out.to(x.dtype) @ self.adapter_in.to(x.dtype) * self.scale
            base = self.base(x.dtype)
            return product(x, base + added.where(base != 0, 0.0), self.bias)
        added = product(product(x, self.adapter_in, None), self.adapter_out, None) * self.scale
        if not hasattr(self, "magnitude"):
            return self.product(x, self.weight, self.bias) + added
        stretch = (self.magnitude / self.lengths()).to(x.dtype)
        output = (self.product(x, self.weight, None) + added) * stretch
        return output if self.bias is None else output + self.bias.to(x.dtype)

    def base(self, dtype: torch.dtype) -> Tensor:
        """The frozen matrix."""
        weight: Tensor | QuantizedWeight = self.weight
        return weight.dequantized(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """The norm of each row of the adapted matrix, summed over ranks that hold other columns of it."""
        squares = self.merged_direction().square().sum(dim=1)
        if self.axis is not None and self.shard[0] == 1:
            dist.all_reduce(squares, group=self.axis.group)
        return squares.sqrt()

    def merged_direction(self) -> Tensor:
        """The matrix plus the scaled adapter, in fp32."""
        return self.base(torch.float32) + self.scale * (self.adapter_out.float() @ self.adapter_in.float())


class AdaptedExperts(ExpertLinear):
    """The frozen projection of all experts, with an adapter for each."""

    def __init__(self, linear: ExpertLinear, adapter: AdapterSection, keeps_zeros: bool) -> None:
        nn.Module.__init__(self)
        self.weight = linear.weight
        self.scale, self.keeps_zeros = adapter.alpha / adapter.rank, keeps_zeros
        experts, rows, columns = linear.weight.shape
        device = linear.weight.device
        self.adapter_in = nn.Parameter(torch.empty(experts, adapter.rank, columns, device=device))
        self.adapter_out = nn.Parameter(torch.empty(experts, rows, adapter.rank, device=device))

    def forward(self, x_SD: Tensor, counts_X: Tensor) -> Tensor:
        """The frozen product plus the adapter's."""
        if self.keeps_zeros:
            added = self.adapter_out.to(x_SD.dtype) @ self.adapter_in.to(x_SD.dtype) * self.scale
            base = self.weight.to(x_SD.dtype)
            return self.product(x_SD, base + added.where(base != 0, 0.0), counts_X)
        inner = self.product(x_SD, self.adapter_in, counts_X)
        added = self.product(inner, self.adapter_out, counts_X) * self.scale
        return self.product(x_SD, self.weight, counts_X) + added


def add_adapters(
    model: LanguageModel, adapter: AdapterSection, keeps_zeros: bool = False, stored: BasePrecision | None = None
) -> None:
    """Freeze a model and add adapters to the target matrices of its layers.

    `keeps_zeros` preserves pruned weights. `stored` is the precision of the frozen matrices of all layers.
    """
    for module in model.modules():
        if isinstance(module, MATRIX_MODULES):
            module.to(model.dtype)
    model.requires_grad_(False)
    model.tie()
    refuse_unknown_targets(model.blocks, adapter)
    for layer in model.layers.values():
        for path, linear in list(layer.named_modules()):
            if not isinstance(linear, (Linear, ExpertLinear)) or not adapter.selects(path):
                continue
            parent, _, name = path.rpartition(".")
            kind = AdaptedExperts if isinstance(linear, ExpertLinear) else AdaptedLinear
            setattr(layer.get_submodule(parent), name, kind(linear, adapter, keeps_zeros))  # type: ignore[arg-type]
    if stored is not None:
        quantize_layers(model.layers, *stored)


def refuse_unknown_targets(blocks: ModelBlocks, adapter: AdapterSection) -> None:
    """Raise for targets that select no matrix of any layer."""
    names = {name.removesuffix(".weight") for _, name, param in blocks.layer_params() if len(param.shape) > 1}
    names.discard("mlp.router")
    if not any(adapter.selects(name) for name in names):
        raise UserError(
            f"finetune.adapter.targets matches no matrix of this model family: {', '.join(adapter.targets)}",
            hint=f"use some of {', '.join(sorted(names))}",
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in NAMES


def merged(weight: Tensor, adapter_weights: dict[str, Tensor], scale: float, keeps_zeros: bool = False) -> Tensor:
    """A matrix, or the matrices of all experts, with adapters merged, in fp32."""
    total = weight.float() + scale * (adapter_weights[ADAPTER_OUT].float() @ adapter_weights[ADAPTER_IN].float())
    if MAGNITUDE in adapter_weights:
        total = total * (adapter_weights[MAGNITUDE].float() / total.norm(dim=1))[:, None]
    return total.where(weight != 0, 0.0) if keeps_zeros else total
