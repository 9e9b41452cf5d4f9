"""`[finetune]`: fine-tuning on conversations instead of token files."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator
from pydantic_core import PydanticCustomError

from steelyard.core.recipe.section import Degree, Section
from steelyard.core.recipe.weight_names import runs_of

LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
EXPERTS = "experts"
TARGET_PARTS = (*LINEARS, "attention", "mlp", EXPERTS, "shared")


class AdapterSection(Section):
    """LoRA: trains W + (alpha / rank) B A with W frozen. DoRA also trains the norms of its columns."""

    kind: Literal["lora", "dora"] = "lora"
    rank: Degree = 16
    alpha: PositiveFloat = 32.0
    targets: list[str] = Field(
        list(LINEARS), min_length=1,
        description='the matrices of a layer that get an adapter: "up", "attention", "experts", "mlp.experts.up"',
    )  # fmt: skip

    @field_validator("targets")
    @classmethod
    def _known_parts(cls, value: list[str]) -> list[str]:
        for target in value:
            if not set(target.split(".")) <= set(TARGET_PARTS):
                raise PydanticCustomError("target", f"{target} is no matrix: combine {', '.join(TARGET_PARTS)}")
        return value

    @property
    def has_experts(self) -> bool:
        """Whether a target names experts."""
        return any(EXPERTS in target.split(".") for target in self.targets)

    def selects(self, name: str) -> bool:
        """Whether a matrix of a layer, such as `mlp.experts.up`, gets an adapter.

        A target is any run of consecutive parts of the name. Experts are selected only by a target that names them,
        because an adapter for each of them has many parameters.
        """
        is_expert = EXPERTS in name.split(".")
        targets = [target for target in self.targets if not is_expert or EXPERTS in target.split(".")]
        return any(run in targets for run in runs_of(name))


class BasePrecision(NamedTuple):
    """How the frozen matrices of the layers are stored: `nf4` or `int8`, and whether nf4's scales take 8 bits."""

    name: str
    double_quant: bool


class DpoSection(Section):
    """Direct preference optimization."""

    beta: PositiveFloat = Field(0.1, description="penalty on the distance from the reference model")


class FinetuneSection(Section):
    """The conversations, their format and template, and the loss positions."""

    data: list[str] = Field(min_length=1, description="jsonl or parquet files, patterns, or a name on the hub")
    valid: list[str] = Field([], description="the same for validation; default: a part of data")
    valid_share: NonNegativeFloat = Field(0.05, lt=1, description="fraction for validation, if valid is not set")
    format: str | None = Field(None, description="format of the rows; default: detected from the first row")
    user_marker: str = Field("### Human:", min_length=1, description="format marked: the text before each user message")
    assistant_marker: str = Field("### Assistant:", min_length=1, description="and before each assistant message")
    system: str | None = Field(None, description="a system message for conversations without one")
    template: str | None = Field(None, description="chatml, llama2, llama3, alpaca, japanese, plain or a Jinja file")
    loss: Literal["assistant", "completion", "all"] = Field(
        "assistant", description="loss on every answer, on the last answer only, or on every token"
    )
    epochs: PositiveFloat = Field(1.0, description="passes over the data, unless train.steps is set")
    packing: bool = Field(True, description="several conversations in one row, without attention between them")
    overlong: Literal["truncate", "drop", "refuse"] = Field(
        "truncate", description="what to do with conversations longer than data.sequence_length"
    )
    untrained: Literal["refuse", "drop"] = Field(
        "refuse", description="what to do with conversations without loss positions; both are counted"
    )
    bad_rows: Literal["refuse", "drop"] = Field("refuse", description="what to do with rows that cannot be parsed")
    allow_unknown: bool = Field(False, description="accept data of which more than 5% of the tokens are unknown")
    keep_zeros: bool = Field(True, description="a pruned model keeps its zeros, as with sparsity.method = fixed")
    adapter: AdapterSection | None = None
    base_precision: Literal["nf4", "int8"] | None = Field(
        None, description="QLoRA: the frozen matrices of the layers in 4 or 8 bits; default: in train.precision"
    )
    double_quant: bool = Field(False, description="nf4's scales in 8 bits too: 4.13 bits per weight instead of 4.5")
    neftune: NonNegativeFloat = Field(0.0, description="NEFTune's noise on embeddings; 0: off")
    dpo: DpoSection | None = None
    rows: str | None = Field(None, description="a digest of the data, written by sft: the data must not change")

    @property
    def stored(self) -> BasePrecision | None:
        """The precision of the frozen matrices, if it is not that of the run."""
        return None if self.base_precision is None else BasePrecision(self.base_precision, self.double_quant)

    @field_validator("data", "valid", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value
