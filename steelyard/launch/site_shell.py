"""A shell where ranks would run: the site's modules, environment and container around it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import NoReturn

from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import site_environment

INTERACTIVE = {"docker": ["--interactive", "--tty"], "podman": ["--interactive", "--tty"]}


def script_for(site: SiteSection, command: Sequence[str], reload: bool = False) -> str:
    """What bash is to run: the preparation, then the command or a shell in its place."""
    workdir = str(Path(site.workdir).expanduser() if site.workdir else Path.cwd())
    container = site.container
    if container.kind == "pyxis":  # It is a part of srun; what it runs is enroot's.
        container = container.model_copy(update={"kind": "enroot"})
    if container.kind in INTERACTIVE and not command:
        container = container.model_copy(update={"options": [*INTERACTIVE[container.kind], *container.options]})
    site = site.model_copy(update={"container": container})
    prepared = site_environment.preparation(container, reload)
    default = [os.environ.get("SHELL") or "/bin/bash"] if container.kind == "none" else [site_environment.SHELL]
    gpus = Path("/dev/nvidiactl").exists()
    wrapped = site_environment.wrapped(site, list(command) or default, workdir, None, gpus)
    text = site_environment.preamble(site, workdir)
    text += f"bash -c {quote(prepared)} || exit 1\n" if prepared else ""
    return text + site_environment.executing(wrapped)


def enter(text: str) -> NoReturn:
    """Become that shell."""
    os.execvp("bash", ["bash", "-c", text])  # noqa: S606
