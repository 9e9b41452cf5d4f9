"""`[data]`: which token files to train on, in which proportions, cut how long."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from steelyard.core.recipe.section import Section


class Source(Section):
    """One pair of token files, `<prefix>.bin` and `<prefix>.idx`, and its share of the blend."""

    prefix: str
    weight: PositiveFloat = 1.0


class Data(Section):
    """What is read."""

    tokenizer: str | None = Field(None, description="folder of the tokenizer, for sampling and checks")
    train: list[Source] = Field([], description="a prefix, a list of prefixes, or tables with prefix and weight")
    split: str = Field("98,2,0", description="shares of documents for training, validation and test")
    sequence_length: PositiveInt = 1024

    @field_validator("train", mode="before")
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
