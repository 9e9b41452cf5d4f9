"""Where doctor keeps what it made: links, the file to source, and the record that undoes them.

    ~/.local/share/steelyard/doctor/lib/             links, each named as a library is asked for
    ~/.local/share/steelyard/doctor/environment.sh   to be sourced: LD_LIBRARY_PATH, cleared variables
    ~/.local/share/steelyard/doctor/images/NAME/     links for an image, which lead to places inside it
    ~/.local/share/steelyard/doctor/changes.json     what was done, and what stood there before

XDG_DATA_HOME moves them all; XDG_CONFIG_HOME moves the site profiles.
"""

from __future__ import annotations

from pathlib import Path

from steelyard.doctor.machine import Machine


def home(machine: Machine) -> Path:
    """The user's folder."""
    return Path(machine.environment.get("HOME") or Path.home())


def folder(machine: Machine) -> Path:
    """Doctor's own folder."""
    data = machine.environment.get("XDG_DATA_HOME")
    return (Path(data) if data else home(machine) / ".local" / "share") / "steelyard" / "doctor"


def library_folder(machine: Machine) -> Path:
    """Where links for this machine lie."""
    return folder(machine) / "lib"


def environment_file(machine: Machine) -> Path:
    """The file to source."""
    return folder(machine) / "environment.sh"


def record_file(machine: Machine) -> Path:
    """What was changed."""
    return folder(machine) / "changes.json"


def sites_file(machine: Machine) -> Path:
    """The site profiles."""
    config = machine.environment.get("XDG_CONFIG_HOME")
    return (Path(config) if config else home(machine) / ".config") / "steelyard" / "sites.toml"
