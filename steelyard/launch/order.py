"""All that a job is made of, whoever will run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steelyard.core.recipe.site import Site
from steelyard.launch.groups import Group


@dataclass(frozen=True)
class Order:
    """A job that has been thought through and not started yet."""

    run: Path
    name: str
    site: Site
    groups: list[Group]
    command: list[str]
    workdir: str
    python: str
    submitted: str
    mark: str = ""
    time_limit: str | None = None
    reload_container: bool = False
