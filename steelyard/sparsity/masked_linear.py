"""Linear modules for mask learning: weights are frozen, and logits over the masks of each group are trained.

A linear module gets a parameter `mask_logits` next to its weight, and multiplies with the weight under a mask that is
drawn for each micro-batch (`gumbel.py`). The inputs of the layer identify the micro-batch. So a recomputed layer
draws the same mask again, even if other micro-batches ran in between. The masks of experts are drawn once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.sparsity_section import SparsitySection
from steelyard.model import LanguageModel
from steelyard.model.experts import MATRIX_MODULES, ExpertLinear, RouterOutput
from steelyard.model.modules import Linear
from steelyard.model.transformer import LayerInputs, TransformerLayer
from steelyard.sparsity import gumbel
from steelyard.sparsity.gumbel import GroupOffset
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.target_modules import chosen, maskable


@dataclass(eq=False)
class AnnealState:
    """Shared by all masked modules of a stage: values of the step, on the device, and the candidate masks."""

    candidates_CM: Tensor
    anneal_3: Tensor
    """Scale, temperature and weight_reg of the step."""
    hard: bool
    step_2: Tensor
    """Identifies the step: `gumbel.draw_of_step`."""
    dense: bool = False
    """Compute without masks, for the predictions of the dense model."""


class MaskedLinear(Linear):
    """A linear module under a mask: drawn in training, otherwise the most probable one."""

    mask_logits: nn.Parameter
    draw: Tensor | None = None
    """Identifies the micro-batch and the parameter: `gumbel.draw_of` plus the salt."""

    def __init__(self, linear: Linear, anneal: AnnealState) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        candidates, group = anneal.candidates_CM.shape
        self.groups = linear.in_features // group
        shape = (linear.out_features, self.groups, candidates)
        self.mask_logits = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=linear.weight.device))
        self.anneal = anneal

    @property
    def offset(self) -> GroupOffset:
        """The offset of this rank's shard in the whole weight."""
        dim, index, _ = self.shard
        rows, groups, _ = self.mask_logits.shape
        return GroupOffset(index * rows, 0, self.groups) if dim == 0 else GroupOffset(0, index * groups, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the masked weight."""
        weight, anneal = self.weight.to(x.dtype), self.anneal
        if not anneal.dense and self.draw is None:
            weight = weight * gumbel.argmax_mask(self.mask_logits, anneal.candidates_CM)
        elif not anneal.dense and self.draw is not None:
            arithmetic = _arithmetic(weight, self.mask_logits)
            weight = arithmetic(
                weight, self.mask_logits, anneal.candidates_CM, self.draw, anneal.anneal_3, (0, 0), self.offset,
                anneal.hard,
            )  # fmt: skip
        return self.product(x, weight, self.bias)


class MaskedExperts(ExpertLinear):
    """The same projection of all experts under masks; the groups of each expert are drawn like those of a matrix.

    One mask is drawn per step: with expert parallelism an expert computes tokens of several micro-batches at once.
    The noise of a row depends on its number among the rows of all experts.
    """

    mask_logits: nn.Parameter
    draw: Tensor | None = None

    def __init__(self, linear: ExpertLinear, anneal: AnnealState) -> None:
        nn.Module.__init__(self)
        self.weight, self.anneal = linear.weight, anneal
        candidates, group = anneal.candidates_CM.shape
        experts, rows, columns = linear.weight.shape
        self.groups = columns // group
        shape = (experts, rows, self.groups, candidates)
        self.mask_logits = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=linear.weight.device))

    def forward(self, x_SD: Tensor, counts_X: Tensor) -> Tensor:
        """The product of each slot with the masked matrix of its expert."""
        weight_XOI, anneal = self.weight.to(x_SD.dtype), self.anneal
        if not anneal.dense and self.draw is None:
            weight_XOI = weight_XOI * gumbel.argmax_mask(self.mask_logits, anneal.candidates_CM)
        elif not anneal.dense:
            weight_XOI = self._drawn(weight_XOI)
        return self.product(x_SD, weight_XOI, counts_X)

    def _drawn(self, weight_XOI: Tensor) -> Tensor:
        anneal, (dim, index, count), (first, ranks) = self.anneal, self.shard, self.expert_shard
        experts, rows, groups, _ = self.mask_logits.shape
        first *= experts
        # A rank of the expert axis computes for the micro-batches of all its ranks, but adds the regulariser once.
        anneal_3 = torch.cat([anneal.anneal_3[:2], anneal.anneal_3[2:] * ranks])

        def drawn(weight_OI: Tensor, logits_OGC: Tensor, offset: GroupOffset) -> Tensor:
            return _arithmetic(weight_OI, logits_OGC)(
                weight_OI, logits_OGC, anneal.candidates_CM, self.draw, anneal_3, (0, 0), offset, anneal.hard
            )

        if dim == 1 and count > 1:  # The rows of consecutive experts are not consecutive.
            offsets = [
                GroupOffset((first + number) * rows * count + index * rows, 0, groups) for number in range(experts)
            ]
            return torch.stack([drawn(*each) for each in zip(weight_XOI, self.mask_logits, offsets, strict=True)])
        offset = GroupOffset(first * rows, index * groups if dim == 2 else 0, self.groups)
        return drawn(weight_XOI.flatten(0, 1), self.mask_logits.flatten(0, 1), offset).view_as(weight_XOI)


def masked_sizes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The weights of the whole model that the recipe selects, and their sizes."""
    assert recipe.sparsity is not None
    sizes, where = maskable(recipe.model), (recipe.where("sparsity.include"), recipe.where("sparsity.exclude"))
    return {name: sizes[name] for name in chosen(sizes, recipe.sparsity.include, recipe.sparsity.exclude, where)}


def replace_linears(model: LanguageModel, names: Container[str], make: Callable[[Any, str], nn.Module]) -> None:
    """Replace the linear modules, and those of experts, whose weights are in `names`."""
    kinds = (Linear, ExpertLinear)
    linears = [(f"{name}.weight", module) for name, module in model.named_modules() if isinstance(module, kinds)]
    for name, linear in linears:
        if name in names:
            path, _, own = name.removesuffix(".weight").rpartition(".")
            setattr(model.get_submodule(path), own, make(linear, name))


def freeze(model: LanguageModel) -> None:
    """Freeze all parameters, and store matrices in the compute dtype; norms stay fp32, since they compute in fp32."""
    for module in model.modules():
        if isinstance(module, MATRIX_MODULES):
            module.to(model.dtype)
    model.requires_grad_(False)
    model.tie()


def put_masks(model: LanguageModel, names: Container[str], seed: int, anneal: AnnealState) -> None:
    """Replace linear modules of a frozen model by masked ones, and wrap their layers in `MaskedLayer`."""
    kinds = (MaskedLinear, MaskedExperts)

    def masked_of(linear: Any, _: str) -> nn.Module:
        return kinds[isinstance(linear, ExpertLinear)](linear, anneal)

    replace_linears(model, names, masked_of)
    for number, layer in list(model.layers.items()):
        masked = {name: module for name, module in layer.named_modules() if isinstance(module, kinds)}
        if masked:
            salts = [gumbel.salt_of(seed, f"layers.{number}.{name}.weight") for name in masked]
            salts_N2 = torch.tensor(salts, dtype=torch.int32, device=anneal.candidates_CM.device)
            model.layers[number] = MaskedLayer(layer, list(masked.values()), salts_N2)


def anneal_state_of(sparsity: SparsitySection, device: torch.device) -> AnnealState:
    """The shared values of a run's masked modules, before its first step."""
    candidates = Pattern.parse(sparsity.pattern).candidates().to(device)
    step_2 = torch.zeros(2, dtype=torch.int32, device=device)
    return AnnealState(candidates, torch.ones(3, device=device), sparsity.hard, step_2)


def _arithmetic(weight_OI: Tensor, logits_OGC: Tensor) -> Callable[..., Tensor]:
    """The fused kernels on a GPU if they support these sizes, otherwise their specification."""
    if weight_OI.is_cuda:
        from steelyard.sparsity import masked_kernels

        if masked_kernels.supports(weight_OI, logits_OGC):
            return masked_kernels.masked_weight
    return gumbel.masked_weight


class MaskedLayer(TransformerLayer):
    """A layer that sets the draw of its masked modules for the micro-batch before it computes.

    Salts are tensors: numbers would be compiled as constants, and every layer would need its own graph.
    """

    def __init__(self, layer: nn.Module, masked: list[MaskedLinear | MaskedExperts], salts_N2: Tensor) -> None:
        nn.Module.__init__(self)
        for name, child in layer._modules.items():  # Also norms that are None.
            self.add_module(name, child)
        self.masked, self.salts_N2 = tuple(masked), salts_N2

    def compute(self, x_BLD: Tensor, inputs: LayerInputs) -> tuple[Tensor, RouterOutput | None]:
        """Set the draws, then compute; recomputation in the backward pass sets them again."""
        sample_ids_B = inputs.sample_ids_B
        is_drawn = sample_ids_B is not None and self.training
        of_batch_2 = gumbel.draw_of(sample_ids_B) if is_drawn and sample_ids_B is not None else None
        for linear, salt_2 in zip(self.masked, self.salts_N2, strict=True):
            draw_2 = linear.anneal.step_2 if isinstance(linear, MaskedExperts) else of_batch_2
            linear.draw = draw_2 + salt_2 if is_drawn and draw_2 is not None else None
        return super().compute(x_BLD, inputs)
