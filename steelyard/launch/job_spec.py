"""All that a job is made of, whoever will run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steelyard.core import secrets
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch.launch_record import FOLDER
from steelyard.launch.node_groups import NodeGroup

COMMAND = "command.json"


@dataclass(frozen=True)
class JobSpec:
    """A job that has been thought through and not started yet."""

    run: Path
    name: str
    site: SiteSection
    groups: list[NodeGroup]
    command: list[str]
    workdir: str
    python: str
    submitted: str
    mark: str = ""
    time_limit: str | None = None
    reload_container: bool = False

    @property
    def private_command(self) -> Path | None:
        """The file, for its owner alone, that holds a command with a secret in it; scripts and records do not."""
        has_secret = secrets.redact(self.command) != self.command
        return self.run / FOLDER / COMMAND if has_secret else None

    @property
    def command_arguments(self) -> list[str]:
        """The last arguments of the starter: the command, or where it finds it."""
        private = self.private_command
        return ["--", *self.command] if private is None else ["--command-file", str(private)]
