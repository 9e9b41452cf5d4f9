"""A shell where ranks would run: the site's modules, environment and container around it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import NoReturn

from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import containers, job_script

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
    prepared = containers.preparation(container, reload)
    default = [os.environ.get("SHELL") or "/bin/bash"] if container.kind == "none" else [containers.SHELL]
    gpus = Path("/dev/nvidiactl").exists()
    text = job_script.preamble(site, workdir)
    text += f"bash -c {quote(prepared)} || exit 1\n" if prepared else ""
    return text + job_script.executing(containers.wrapped(site, list(command) or default, workdir, None, gpus))


def enter(text: str) -> NoReturn:
    """Become that shell."""
    os.execvp("bash", ["bash", "-c", text])  # noqa: S606
