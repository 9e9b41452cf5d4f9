"""A shell in the environment of the ranks: with the site's modules, variables and container."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from pwd import getpwuid
from shlex import quote
from typing import NoReturn

from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import site_environment
from steelyard.launch.job_spec import NVIDIA

INTERACTIVE = {"docker": ["--interactive", "--tty"], "podman": ["--interactive", "--tty"]}

# In an image: the user's shell if the image has it, else bash, else sh.
FIRST_SHELL = [
    site_environment.SHELL, "-c", 'for each in "$0" /bin/bash /bin/sh; do [ ! -x "$each" ] || exec "$each"; done',
]  # fmt: skip


def script_for(site: SiteSection, command: Sequence[str], reload: bool = False) -> str:
    """The script for bash: the preparation, then the command, or a shell if there is none."""
    workdir = str(Path(site.workdir).expanduser() if site.workdir else Path.cwd())
    container = site.container
    if container.kind == "pyxis":  # Pyxis is a plugin of srun; without srun, enroot runs the image.
        container = container.model_copy(update={"kind": "enroot"})
    if container.kind in INTERACTIVE and not command:
        container = container.model_copy(update={"options": [*INTERACTIVE[container.kind], *container.options]})
    site = site.model_copy(update={"container": container})
    prepared = site_environment.preparation(container, reload)
    shell = os.environ.get("SHELL") or getpwuid(os.getuid()).pw_shell or "/bin/bash"
    default = [shell] if container.kind == "none" else [*FIRST_SHELL, shell]
    wrapped = site_environment.wrapped(site, list(command) or default, workdir, None, NVIDIA.exists())
    text = site_environment.preamble(site, workdir)
    text += f"bash -c {quote(prepared)} || exit 1\n" if prepared else ""
    return text + site_environment.executing(wrapped)


def enter(text: str) -> NoReturn:
    """Replace this process with that shell."""
    os.execvp("bash", ["bash", "-c", text])  # noqa: S606
