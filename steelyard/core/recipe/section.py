"""What all sections share: unknown keys are refused, types are not bent, and a loaded recipe never changes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from steelyard.core import secrets
from steelyard.core.recipe.toml import leaves


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True, protected_namespaces=())


def contradiction(key: str, message: str, mend: str) -> PydanticCustomError:
    """The error for values that are fine alone and wrong together; `key` is where the reader should look."""
    # The braces of a message would be read as a template.
    return PydanticCustomError("contradiction", "{message}", {"message": message, "key": key, "mend": mend})


def refuse_secrets(section: Section) -> None:
    """Recipes and sites are copied into run folders, scripts and reports."""
    for key, value in leaves(section.model_dump(exclude_defaults=True)):
        if secrets.is_secret(str(value)):
            raise contradiction(
                key, "holds a secret, which would be written into scripts and logs",
                "set a variable in the shell that starts the job: jobs inherit it",
            )  # fmt: skip
