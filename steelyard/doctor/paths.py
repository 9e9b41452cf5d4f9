"""The files that doctor writes: links, the file to source, and the record for `--undo`.

    ~/.local/share/steelyard/doctor/lib/             links, each named after the soname that is needed
    ~/.local/share/steelyard/doctor/environment.sh   to be sourced: LD_LIBRARY_PATH, cleared variables
    ~/.local/share/steelyard/doctor/images/NAME/     links for an image, whose targets are inside it
    ~/.local/share/steelyard/doctor/changes.json     the changes, and the previous contents

XDG_DATA_HOME moves them all; XDG_CONFIG_HOME moves the site profiles.
"""

from __future__ import annotations

from pathlib import Path

from steelyard.doctor.machine import Machine


def home(machine: Machine) -> Path:
    """The user's home folder."""
    return Path(machine.environment.get("HOME") or Path.home())


def folder(machine: Machine) -> Path:
    """Doctor's own folder."""
    data = machine.environment.get("XDG_DATA_HOME")
    return (Path(data) if data else home(machine) / ".local" / "share") / "steelyard" / "doctor"


def library_folder(machine: Machine) -> Path:
    """The folder of the links for this machine."""
    return folder(machine) / "lib"


def environment_file(machine: Machine) -> Path:
    """The file to source."""
    return folder(machine) / "environment.sh"


def record_file(machine: Machine) -> Path:
    """The record of the changes."""
    return folder(machine) / "changes.json"


def sites_file(machine: Machine) -> Path:
    """The site profiles."""
    config = machine.environment.get("XDG_CONFIG_HOME")
    return (Path(config) if config else home(machine) / ".config") / "steelyard" / "sites.toml"
