"""The shell script of a job. Every word that comes from a person is quoted, so that it is a word and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import join, quote

from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch.containers import CLEARED

HEAD = "#!/bin/bash\n# Written by steelyard submit; changes are lost with the next one.\n"
MODULES = """if ! command -v module >/dev/null; then
    for file in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /usr/share/modules/init/bash; do
        if [ -r "$file" ]; then . "$file"; break; fi
    done
fi
"""


def preamble(site: SiteSection, workdir: str) -> str:
    """What a place needs before a command: modules, environment, and the folder to work in."""
    lines = [HEAD]
    if site.modules:
        lines.append(f"{MODULES}module load {join(site.modules)} || exit 1\n")
    if site.container.kind != "none":
        lines.append(f"unset {' '.join(CLEARED)}\n")
    lines += [_exported(site, name, quote(value)) for name, value in site.environment.items()]
    for name, folders in site.prepend.items():
        if name == "PATH":
            lines.append(_exported_path(site, quote(":".join(folders))))
            continue
        lines.append(_exported(site, name, f'{quote(":".join(folders))}"${{{name}:+:${name}}}"'))
    lines.append(f"cd -- {quote(workdir)} || exit 1\n")
    return "".join(lines)


def _exported(site: SiteSection, name: str, value: str) -> str:
    """A variable; apptainer takes some, like LD_LIBRARY_PATH, only under a name of its own."""
    lines = f"export {name}={value}\n"
    if site.container.kind in ("apptainer", "singularity"):
        lines += f'export {site.container.kind.upper()}ENV_{name}="${name}"\n'
    return lines


def _exported_path(site: SiteSection, folders: str) -> str:
    """PATH, which inside an image is the image's own: the host's would hide its programs."""
    lines = f'export PATH={folders}"${{PATH:+:$PATH}}"\n'
    if site.container.kind in ("apptainer", "singularity"):
        lines += f"export {site.container.kind.upper()}ENV_PREPEND_PATH={folders}\n"
    return lines


def executing(command: Sequence[str]) -> str:
    """A last line: the command in the place of the shell, so that signals reach it."""
    return f"exec {join(command)}\n"
