"""`--fix`: links for sonames that the loader does not find, and a file to source, all in doctor's own folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote

from steelyard.core.errors import UserError
from steelyard.doctor import undo_log
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.paths import environment_file, library_folder
from steelyard.doctor.undo_log import Change

HEAD = "# Written by steelyard doctor --fix, for: source FILE. steelyard doctor --undo removes it.\n"


def planned(machine: Machine, findings: Sequence[Finding]) -> list[Change]:
    """The changes for these findings, in order; empty if none of them can be repaired this way."""
    links = {name: target for finding in findings for name, target in finding.links.items()}
    unset = dict.fromkeys(name for finding in findings for name in finding.unset)
    if not links and not unset:
        return []
    folder, environment = library_folder(machine), environment_file(machine)
    if ":" in str(folder):
        raise UserError(
            f"{folder} contains a colon, which LD_LIBRARY_PATH cannot represent",
            hint="set XDG_DATA_HOME to another folder",
        )
    made = undo_log.folders_to(folder if links else environment.parent)
    for name, target in links.items():
        made += undo_log.link(folder / name, target)
    earlier = environment.read_text(encoding="utf-8") if environment.exists() else ""
    with_links = bool(links) or "LD_LIBRARY_PATH" in earlier
    cleared = dict.fromkeys([*re.findall(r"^unset (\w+)$", earlier, re.MULTILINE), *unset])
    return made + undo_log.file(environment, script(str(folder) if with_links else None, list(cleared)))


def script(folder: str | None, unset: Sequence[str]) -> str:
    """The file to source."""
    lines = [HEAD]
    if folder is not None:
        lines.append(f'export LD_LIBRARY_PATH={quote(folder)}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n')
    lines += [f"unset {name}\n" for name in unset]
    return "".join(lines)
