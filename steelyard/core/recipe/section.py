"""The base class of all sections: unknown keys are errors, types are strict, and a loaded recipe is immutable.

Integers have upper limits. An absurd number is an error when a file is read, rather than later an overflow in a library
or an endless loop.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from steelyard.core import secrets
from steelyard.core.recipe.toml import leaves

# Larger than in any run, and the product of four of them fits in a float. Sizes have their own limits.
LARGEST = 10**15
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Degree = Annotated[int, Field(gt=0, le=10**6)]  # of parallelism, or ranks
Batch = Annotated[int, Field(gt=0, le=10**6)]  # samples of one step
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range of NumPy


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True, protected_namespaces=())


def contradiction(key: str, message: str, hint: str) -> PydanticCustomError:
    """The error for values that are valid alone but not together; `key` is the key to report."""
    # Pydantic would parse braces in the message as a template.
    return PydanticCustomError("contradiction", "{message}", {"message": message, "key": key, "hint": hint})


def refuse_secrets(section: Section) -> None:
    """Raise if a value holds a secret: recipes and sites are copied into run folders, scripts and reports."""
    for key, value in leaves(section.model_dump(exclude_defaults=True)):
        if secrets.is_secret(str(value)):
            raise contradiction(
                key, "holds a secret, which would be written into scripts and logs",
                "set an environment variable in the shell that starts the job: jobs inherit it",
            )  # fmt: skip
