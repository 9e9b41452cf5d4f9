"""What all sections share: unknown keys are refused, types are not bent, and a loaded recipe never changes.

Integers are bounded here. A number beyond any use is refused when a file is read, rather than later by an overflow in
a library or by a loop that never ends.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from steelyard.core import secrets
from steelyard.core.recipe.toml import leaves

# Far beyond any run, and products of four of them still fit where numbers are floats. Sizes have limits of their own.
LARGEST = 10**15
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Degree = Annotated[int, Field(gt=0, le=10**6)]  # of parallelism, or ranks
Batch = Annotated[int, Field(gt=0, le=10**6)]  # samples of one step
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # as NumPy takes them


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True, protected_namespaces=())


def contradiction(key: str, message: str, hint: str) -> PydanticCustomError:
    """The error for values that are fine alone and wrong together; `key` is where the reader should look."""
    # The braces of a message would be read as a template.
    return PydanticCustomError("contradiction", "{message}", {"message": message, "key": key, "hint": hint})


def refuse_secrets(section: Section) -> None:
    """Recipes and sites are copied into run folders, scripts and reports."""
    for key, value in leaves(section.model_dump(exclude_defaults=True)):
        if secrets.is_secret(str(value)):
            raise contradiction(
                key, "holds a secret, which would be written into scripts and logs",
                "set a variable in the shell that starts the job: jobs inherit it",
            )  # fmt: skip
