"""The metadata of a study's folder: its tune file, and the address of its database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from steelyard.core import files, secrets
from steelyard.core.errors import UserError
from steelyard.core.recipe import to_toml
from steelyard.core.recipe.load import written
from steelyard.core.recipe.renamed_keys import migrate_dotted
from steelyard.core.safe_parse import loads
from steelyard.tune import storage
from steelyard.tune.spec import Tune

if TYPE_CHECKING:
    from optuna.study import Study

SETTINGS, RECIPE = "tune.json", "recipe.toml"


def remember(tune: Tune, folder: Path, url: str) -> None:
    """Write the study's settings and database address, without passwords."""
    settings = secrets.redact(tune.model_dump(mode="json", exclude_none=True))
    if tune.recipe is not None:  # The study must be readable on other machines, and after the recipe has changed.
        files.write_text(folder / RECIPE, to_toml(written(tune.recipe)))
    is_own = url == storage.url_of(folder, None)
    files.write_json(folder / SETTINGS, {"tune": settings, "storage": None if is_own else storage.shown(url)})


def opened(folder: Path, given: str | None = None) -> tuple[Tune, Study]:
    """The tune file and the study of a folder."""
    try:
        stored = loads(migrate_dotted((folder / SETTINGS).read_text(encoding="utf-8")))
        tune = Tune.model_validate(stored["tune"])
        if tune.recipe is not None:
            tune = tune.model_copy(update={"recipe": str(folder / RECIPE)})
    except FileNotFoundError:
        hint = "steelyard tune creates studies under studies/"
        raise UserError(f"{folder} is not a study: it has no {SETTINGS}", hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        raise UserError(f"{folder / SETTINGS} is damaged", hint="run the study's command again") from None
    address = given or stored.get("storage")
    if given is None and address and "***" in address:
        raise UserError(
            f"the study is in {address}, whose password is not stored",
            hint="pass --storage, or set STEELYARD_TUNE_STORAGE",
        )
    return tune, storage.load_study(storage.url_of(folder, address), tune.name)
