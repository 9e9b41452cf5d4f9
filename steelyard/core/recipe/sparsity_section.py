"""`[sparsity]`: training of N:M sparse models, with learned, SR-STE, joint or fixed masks."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator
from pydantic_core import PydanticCustomError

from steelyard.core.recipe.section import PositiveInt, Section, contradiction
from steelyard.core.recipe.weight_names import matches

Range = Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)]
RangeFromZero = Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]
LEARNED_PATTERNS = ("2:4", "1:4")
OF_LEARNED = (
    "prior", "prior_strength", "std", "temperature", "scale", "weight_reg", "hard", "learning_rate",
    "learning_rate_multiplier", "weight_decay",
)  # fmt: skip
DISTILL = ("distill", "distill_temperature")
OF_JOINT = ("mask_every", "freeze_after", "importance")


class SparsitySection(Section):
    """The method and its parameters.

    `learned`: weights are frozen and the masks are trained. `sr-ste`: weights are trained, and the largest of each
    group are used. `joint`: weights are trained, and those outside the masks, which change at first, fall to exactly
    zero. `fixed`: weights are trained, and those that are zero, or masked in a mask file, stay zero.
    """

    method: Literal["learned", "sr-ste", "joint", "fixed"]
    pattern: str = Field("2:4", description="N:M keeps N of M neighbours along the input; learned: 2:4 or 1:4")
    include: list[str] = Field(
        [], description='matrices to mask: "mlp", "attention.output", "0-3"; default: all in layers'
    )
    exclude: list[str] = Field([], description="matrices to leave dense, in the same format")

    base: str | None = Field(
        None, description="weights of the masks; default: train.init_from, or the base of that run"
    )
    prior: str | None = Field(None, description='initial mask: a mask file, or "weights": the non-zero weights')
    prior_strength: NonNegativeFloat = 3.0
    std: PositiveFloat = Field(0.01, description="of the initial logits")
    temperature: Range = Field([4.0, 0.05], description="at the first and last step, linear between, like the next two")
    scale: Range = Field([1e2, 5e2], description="factor of the logits, relative to the Gumbel noise")
    weight_reg: RangeFromZero = Field([1e-5, 0.0], description="strength of the preference for large weights")
    hard: bool = Field(False, description="use one candidate of each group, with a straight-through estimator")
    learning_rate: PositiveFloat | None = Field(None, description="of the logits; default: optim's, multiplied")
    learning_rate_multiplier: PositiveFloat = Field(1.0, description="of optim.learning_rate, for the logits")
    weight_decay: NonNegativeFloat = Field(0.0, description="of the logits")
    distill: NonNegativeFloat = Field(
        default_factory=lambda data: 1.0 if data["method"] == "joint" else 0.0,
        description="weight of the KL divergence from the dense model's predictions; default: joint 1, otherwise 0",
    )
    distill_temperature: PositiveFloat = 1.0

    mask: str | None = Field(
        None, description="fixed and joint: a mask file; default: the zeros of the weights, or the largest weights"
    )
    decay: NonNegativeFloat = Field(2e-4, description="sr-ste: decay of the masked weights")
    mask_every: PositiveInt = Field(10, description="joint: steps after which the masks are chosen again")
    importance: Literal["gradient", "magnitude"] = Field(
        "gradient", description="joint: masks keep the largest weights; gradient: times the norm of its column"
    )
    freeze_after: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="joint: share of the steps until masked weights are zero and the masks stay"
    )

    @field_validator("pattern")
    @classmethod
    def _kept_of_group(cls, value: str) -> str:
        found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", value)
        if found is None or int(found[1]) >= int(found[2]):
            raise PydanticCustomError("pattern", 'must be kept:group, like "2:4"')
        return value

    def selects(self, name: str) -> bool:
        """Whether `include` and `exclude` select a weight."""
        is_included = not self.include or any(matches(name, pattern) for pattern in self.include)
        return is_included and not any(matches(name, pattern) for pattern in self.exclude)

    @property
    def kept_and_group(self) -> tuple[int, int]:
        """N and M of the pattern."""
        kept, group = self.pattern.split(":")
        return int(kept), int(group)

    @model_validator(mode="after")
    def _of_one_method(self) -> SparsitySection:
        unused_keys: dict[str, tuple[str, ...]] = {
            "learned": ("mask", "decay", *OF_JOINT),
            "sr-ste": (*OF_LEARNED, *DISTILL, *OF_JOINT, "base", "mask"),
            "joint": (*OF_LEARNED, "decay"),
            "fixed": (*OF_LEARNED, *DISTILL, *OF_JOINT, "decay", "pattern"),
        }
        for key in unused_keys[self.method]:
            default = type(self).model_fields[key].get_default(call_default_factory=True, validated_data=self.__dict__)
            if key in self.model_fields_set and getattr(self, key) != default:
                raise contradiction(f"sparsity.{key}", f'is not used with method = "{self.method}"', "remove it")
        if self.method == "learned" and self.pattern not in LEARNED_PATTERNS:
            raise contradiction(
                "sparsity.pattern",
                f"masks of {self.pattern} cannot be learned",
                f"learned patterns are {' and '.join(LEARNED_PATTERNS)}; sr-ste takes any N:M",
            )
        if self.learning_rate is not None and self.learning_rate_multiplier != 1:
            raise contradiction(
                "sparsity.learning_rate_multiplier", "sparsity.learning_rate is also set", "choose one of the two"
            )
        return self
