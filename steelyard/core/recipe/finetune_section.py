"""`[finetune]`: tuning on conversations instead of token files."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from steelyard.core.recipe.section import Degree, Section

Linear = Literal["query", "key", "value", "output", "gate", "up", "down"]


class AdapterSection(Section):
    """Small matrices that learn beside frozen weights: W + (alpha / rank) B A, and for DoRA its columns' lengths."""

    kind: Literal["lora", "dora"] = "lora"
    rank: Degree = 16
    alpha: PositiveFloat = 32.0
    targets: list[Linear] = Field(
        list(get_args(Linear)), min_length=1, description="the matrices of a layer that get one"
    )


class DpoSection(Section):
    """Preferences instead of answers: direct preference optimization."""

    beta: PositiveFloat = Field(0.1, description="how dearly distance from the reference model is paid for")


class FinetuneSection(Section):
    """What to learn from, how it is written out, and what of it is learned."""

    data: list[str] = Field(min_length=1, description="jsonl or parquet files, patterns, or a name on the hub")
    valid: list[str] = Field([], description="the same for validation; left out: a share of data")
    valid_share: NonNegativeFloat = Field(0.05, lt=1, description="of the conversations, where valid is left out")
    format: str | None = Field(None, description="how the rows are written; left out: what the first row shows")
    user_marker: str = Field(
        "### Human:", min_length=1, description="shape marked: what stands before the user's words"
    )
    assistant_marker: str = Field("### Assistant:", min_length=1, description="and before the assistant's")
    system: str | None = Field(None, description="a system message for conversations without one")
    template: str | None = Field(None, description="chatml, llama2, llama3, alpaca, japanese, plain or a Jinja file")
    loss: Literal["assistant", "completion", "all"] = Field(
        "assistant", description="learn every answer, the last one alone, or every token"
    )
    epochs: PositiveFloat = Field(1.0, description="passes over the data, unless train.steps is set")
    packing: bool = Field(True, description="several conversations a row, kept apart in attention and positions")
    overlong: Literal["truncate", "drop", "refuse"] = Field(
        "truncate", description="what becomes of conversations longer than data.sequence_length"
    )
    untrained: Literal["refuse", "drop"] = Field(
        "refuse", description="what becomes of conversations without a token to learn; both are counted"
    )
    bad_rows: Literal["refuse", "drop"] = Field("refuse", description="what becomes of rows that cannot be read")
    keep_zeros: bool = Field(
        True, description="a model that was pruned keeps its zeros, as sparsity.method = fixed does"
    )
    adapter: AdapterSection | None = None
    neftune: NonNegativeFloat = Field(0.0, description="strength of NEFTune's noise on embeddings; 0 is none")
    dpo: DpoSection | None = None
    rows: str | None = Field(
        None, description="a digest of what is learned from, which sft writes: data must not change"
    )

    @field_validator("data", "valid", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value
