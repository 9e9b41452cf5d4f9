"""What all sections share: unknown keys are refused, types are not bent, and a loaded recipe never changes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True, protected_namespaces=())


def contradiction(key: str, message: str, mend: str) -> PydanticCustomError:
    """The error for values that are fine alone and wrong together; `key` is where the reader should look."""
    # The braces of a message would be read as a template.
    return PydanticCustomError("contradiction", "{message}", {"message": message, "key": key, "mend": mend})
