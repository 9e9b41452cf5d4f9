"""`[data]`: the token files to train on, their weights, and the sequence length."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, field_validator
from pydantic_core import PydanticCustomError

from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section


class DataSource(Section):
    """One pair of token files, `<prefix>.bin` and `<prefix>.idx`, and its weight in the blend."""

    prefix: str
    weight: PositiveFloat = 1.0


class DataSection(Section):
    """The training, validation and test data."""

    tokenizer: str | None = Field(None, description="tokenizer folder, for sampling and checks")
    train: list[DataSource] = Field(
        [], description="prefixes, folders or patterns of token files, each a string or a table of prefix and weight"
    )
    valid: list[DataSource] = Field([], description="files for validation only; default: a part of data.train")
    test: list[DataSource] = Field([], description="files for testing only; default: a part of data.train")
    split: str = Field("98,2,0", description="parts of the documents of data.train for training, validation and test")
    sequence_length: PositiveInt = 1024
    fixed_length: bool = Field(
        False, description="every document is one sample, as written by `data tokenize --fixed-length`"
    )
    mask_documents: bool = Field(False, description="no attention across document boundaries")
    reset_positions: bool = Field(False, description="position ids restart at each document")
    end_of_document: NonNegativeInt | None = Field(None, description="token id; default: the tokenizer's")
    blend_order: Literal["standard", "fma"] = Field(
        "standard", description="fma: the order of a Megatron helper compiled with fused multiply-add, as on ARM"
    )
    index_cache: str | None = Field(None, description="folder for index maps; default: the folder of the token files")
    index_names: Literal["new", "old"] = Field("new", description="file names of Megatron-core or of older Megatron-LM")

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
    """The fractions of training, validation and test in `98,2,0`. They sum to 1; missing ones are 0."""
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise PydanticCustomError("split", "must be up to three numbers like 98,2,0")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test
