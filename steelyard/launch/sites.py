"""Sites: named descriptions of where jobs run, in `~/.config/steelyard/sites.toml`, one table per site.

    default = "campus"                  # used if no site is named

    [campus]
    modules = ["apptainer", "cuda/12.4"]

    [campus.slurm]
    account = "nlp"
    partition = "gpu2"
    cpus_per_rank = 8

    [campus.environment]
    NCCL_DEBUG = "WARN"

    [campus.container]
    kind = "apptainer"
    image = "/images/steelyard.sif"
    binds = ["/data"]

A recipe may have its own `[site]`, whose keys override those of the file. All keys: `core/recipe/site_section.py`.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steelyard.core.errors import UserError
from steelyard.core.recipe.load import explained
from steelyard.core.recipe.site_section import SiteSection
from steelyard.core.recipe.toml import parse

DEFAULT = "default"


def path() -> Path:
    """The path of the sites file."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "steelyard" / "sites.toml"


def find(name: str | None, own: SiteSection | None = None, file: Path | None = None) -> tuple[str | None, SiteSection]:
    """The name and the keys of a site, or of the default site, with the recipe's own keys on top."""
    tables, places, where = _read(file)
    wanted = name if name is not None else tables.get(DEFAULT)
    if wanted is not None and (not isinstance(wanted, str) or not isinstance(tables.get(wanted), dict)):
        raise _unknown(wanted, tables, where)
    values: dict[str, Any] = tables[wanted] if wanted is not None else {}
    try:
        site = SiteSection.model_validate(values)
    except ValidationError as error:
        prefix = f"{wanted}."
        inside = {key.removeprefix(prefix): place for key, place in places.items() if key.startswith(prefix)}
        raise explained(error, values, inside, str(where), SiteSection) from None
    if own is not None:
        site = SiteSection.model_validate(_merged(site.model_dump(), own.model_dump(exclude_unset=True)))
    return wanted, site


def changed(site: SiteSection, hosts: str | None, port: int | None) -> SiteSection:
    """The site with the values of the command line."""
    if hosts is not None:
        names = [host.strip() for host in hosts.split(",")]
        site = site.model_copy(update={"mpi": site.mpi.model_copy(update={"hosts": names})})
    return site if port is None else site.model_copy(update={"port": port})


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in top.items():
        below = base.get(key)
        both[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def _read(file: Path | None) -> tuple[dict[str, Any], dict[str, str], Path]:
    where = file or path()
    try:
        text = where.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if file is not None:
            raise UserError("there is no such file", where=str(where)) from None
        return {}, {}, where
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(where)) from None
    values, places = parse(text, str(where))
    return values, places, where


def _unknown(name: Any, tables: dict[str, Any], where: Path) -> UserError:
    known = sorted(key for key, value in tables.items() if isinstance(value, dict))
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"sites there: {', '.join(known)}" if known else "describe it there"
    return UserError(f"there is no site {name}", where=str(where), hint=hint)
