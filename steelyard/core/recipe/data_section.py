"""`[data]`: which token files to train on, in which proportions, cut how long."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, field_validator
from pydantic_core import PydanticCustomError

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section


class DataSource(Section):
    """One pair of token files, `<prefix>.bin` and `<prefix>.idx`, and its share of the blend."""

    prefix: str
    weight: PositiveFloat = 1.0


class DataSection(Section):
    """What is read."""

    tokenizer: str | None = Field(None, description="folder of the tokenizer, for sampling and checks")
    train: list[DataSource] = Field(
        [], description="prefixes, folders or patterns of token files, each alone or as a table with prefix and weight"
    )
    valid: list[DataSource] = Field([], description="files for validation alone; left out: a share of data.train")
    test: list[DataSource] = Field([], description="files for testing alone; left out: a share of data.train")
    split: str = Field("98,2,0", description="shares of the documents of data.train for training, validation and test")
    sequence_length: PositiveInt = 1024
    fixed_length: bool = Field(
        False, description="every document is one sample, as `data tokenize --fixed-length` writes"
    )
    mask_documents: bool = Field(False, description="attention does not reach into the document before")
    reset_positions: bool = Field(False, description="positions start anew with each document")
    end_of_document: NonNegativeInt | None = Field(None, description="left out: the tokenizer's")
    blend_order: Literal["standard", "fma"] = Field(
        "standard", description="fma: the order of a Megatron helper built with fused multiply-add, as on ARM"
    )
    index_cache: str | None = Field(None, description="folder for index maps; left out: beside the token files")
    index_names: Literal["new", "old"] = Field("new", description="Megatron-core's names or those of older Megatrons")

    @field_validator("train", "valid", "test", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        entries = value if isinstance(value, list) else [value]
        return [{"prefix": entry} if isinstance(entry, str) else entry for entry in entries]

    @field_validator("split", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> str:
        split_shares(str(value))
        return str(value)


def split_shares(split: str) -> tuple[float, float, float]:
    """The fractions of `98,2,0`: training, validation and test, summing to 1. Missing ones are 0."""
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise PydanticCustomError("split", "must be up to three shares like 98,2,0")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test
