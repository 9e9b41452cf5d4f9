"""Learning which weights stay: the model's weights are frozen, and logits over the masks of each group are trained.

A linear map of a layer gets a parameter `mask_logits` beside its weight, and multiplies with the weight under a mask
that each micro-batch draws anew (`gumbel.py`). Which micro-batch it is comes in with the stream, in the context of the
layer: a layer computed again, or one that other micro-batches have passed meanwhile, draws what it drew before.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.sparsity_section import SparsitySection
from steelyard.model import LanguageModel
from steelyard.model.language_model import Context, TransformerLayer
from steelyard.model.modules import Linear
from steelyard.sparsity import gumbel
from steelyard.sparsity.gumbel import GroupOffset
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.target_modules import chosen, maskable


@dataclass(eq=False)
class Course:
    """What all masked maps of a stage share: numbers of the step, on the device, and the candidates."""

    candidates_CM: Tensor
    course_3: Tensor
    """Scale, temperature and weight_reg of the step."""
    hard: bool
    dense: bool = False
    """Leave the masks out, for the predictions of the model as it was."""


class MaskedLinear(Linear):
    """A matrix product with some weights of each group; which ones is drawn, or the likeliest where nothing is."""

    mask_logits: nn.Parameter
    draw: Tensor | None = None
    """Which micro-batch this is, and which parameter: `gumbel.draw_of` plus the salt."""

    def __init__(self, linear: Linear, course: Course) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        candidates, group = course.candidates_CM.shape
        self.groups = linear.in_features // group
        shape = (linear.out_features, self.groups, candidates)
        self.mask_logits = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=linear.weight.device))
        self.course = course

    @property
    def place(self) -> GroupOffset:
        """Where this rank's part of the weight lies in the whole."""
        dim, index, _ = self.part
        rows, groups, _ = self.mask_logits.shape
        return GroupOffset(index * rows, 0, self.groups) if dim == 0 else GroupOffset(0, index * groups, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the masked weight."""
        weight, course = self.weight.to(x.dtype), self.course
        if not course.dense and self.draw is None:
            weight = weight * gumbel.argmax_mask(self.mask_logits, course.candidates_CM)
        elif not course.dense and self.draw is not None:
            arithmetic = _arithmetic(weight, self.mask_logits)
            weight = arithmetic(
                weight, self.mask_logits, course.candidates_CM, self.draw, course.course_3, (0, 0), self.place,
                course.hard,
            )  # fmt: skip
        return self.product(x, weight, self.bias)


def masked_sizes(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """The weights of the whole model that the recipe chooses, and their sizes."""
    assert recipe.sparsity is not None
    sizes, where = maskable(recipe.model), (recipe.where("sparsity.include"), recipe.where("sparsity.exclude"))
    return {name: sizes[name] for name in chosen(sizes, recipe.sparsity.include, recipe.sparsity.exclude, where)}


def replace_linears(model: LanguageModel, names: Container[str], make: Callable[[Linear, str], Linear]) -> None:
    """Put other maps in the place of those whose weights are named."""
    found = [(f"{name}.weight", module) for name, module in model.named_modules() if isinstance(module, Linear)]
    for name, linear in found:
        if name in names:
            path, _, own = name.removesuffix(".weight").rpartition(".")
            setattr(model.get_submodule(path), own, make(linear, name))


def freeze(model: LanguageModel) -> None:
    """Have nothing learn, and keep matrices in the precision they are used in; norms stay fp32, as they compute."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.to(model.dtype)
    model.requires_grad_(False)
    model.tie()


def put_masks(model: LanguageModel, names: Container[str], seed: int, course: Course) -> None:
    """Put masked maps in the place of a frozen model's plain ones, and have each layer tell them what to draw."""
    replace_linears(model, names, lambda linear, name: MaskedLinear(linear, course))
    for number, layer in list(model.layers.items()):
        masked = {name: module for name, module in layer.named_modules() if isinstance(module, MaskedLinear)}
        if masked:
            salts = [gumbel.salt_of(seed, f"layers.{number}.{name}.weight") for name in masked]
            salts_N2 = torch.tensor(salts, dtype=torch.int32, device=course.candidates_CM.device)
            model.layers[number] = MaskedLayer(layer, list(masked.values()), salts_N2)


def course_of(sparsity: SparsitySection, device: torch.device) -> Course:
    """What the masked maps of a run share, before its first step."""
    candidates = Pattern.parse(sparsity.pattern).candidates().to(device)
    return Course(candidates, torch.ones(3, device=device), sparsity.hard)


def _arithmetic(weight_OI: Tensor, logits_OGC: Tensor) -> Callable[..., Tensor]:
    """The fused kernels where there is a GPU and they take these sizes, else their specification."""
    if weight_OI.is_cuda:
        from steelyard.sparsity import masked_kernels

        if masked_kernels.suits(weight_OI, logits_OGC):
            return masked_kernels.masked_weight
    return gumbel.masked_weight


class MaskedLayer(TransformerLayer):
    """A layer that tells its masked maps which micro-batch this is, before it computes.

    Salts are tensors: numbers would be compiled in, and every layer would be a graph of its own.
    """

    def __init__(self, layer: nn.Module, masked: list[MaskedLinear], salts_N2: Tensor) -> None:
        nn.Module.__init__(self)
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.masked, self.salts_N2 = tuple(masked), salts_N2

    def compute(self, x_BLD: Tensor, context: Context) -> Tensor:
        """Set what to draw, then compute; the backward pass that computes a layer again sets it again."""
        sample_ids_B = context.sample_ids_B
        draws: list[Tensor | None] = [None] * len(self.masked)
        if sample_ids_B is not None and self.training:
            draws = list((gumbel.draw_of(sample_ids_B) + self.salts_N2).unbind())
        for linear, draw in zip(self.masked, draws, strict=True):
            linear.draw = draw
        return super().compute(x_BLD, context)
