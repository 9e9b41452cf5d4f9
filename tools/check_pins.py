"""Checks that every pinned version can be installed on each supported Python and architecture, on any machine.

For each pin it reads the package's page on the index and looks for a wheel for the target, or a source distribution
(listed, since pip has to build it). The dependencies of the packages installed here are also evaluated for each
target: a dependency that only another Python needs must be pinned as well.

Use: `.venv/bin/python tools/check_pins.py [--index URL] [--json FILE]`. Exits with 1 if a pin has no file for a target
or a dependency has no pin.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from pin import parts  # noqa: E402
from setup import PYTHONS, TORCH, TRITON  # noqa: E402

FILES = ("requirements.txt", "requirements-dev.txt", "requirements-peers.txt")
NO_DEPENDENCIES = "requirements-peers.txt"
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)  # minimum of PyTorch's wheels
LINK = re.compile(r"<a\s([^>]*)>([^<]*)</a>", re.IGNORECASE)
REQUIRES_PYTHON = re.compile(r'data-requires-python="([^"]*)"', re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """One Python version on one architecture, on Linux."""

    python: tuple[int, int]
    machine: str

    @property
    def name(self) -> str:
        """Its column heading, such as `3.13 aarch64`."""
        return f"{self.python[0]}.{self.python[1]} {self.machine}"

    @cached_property
    def tags(self) -> set[Tag]:
        """The wheel tags that pip accepts there."""
        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in range(GLIBC[1], 4, -1)]
        platforms += [f"manylinux{old}_{self.machine}" for old in ("2014", "2010", "1")] + [f"linux_{self.machine}"]
        interpreter = f"cp{self.python[0]}{self.python[1]}"
        return {*cpython_tags(self.python, platforms=platforms), *compatible_tags(self.python, interpreter, platforms)}

    def environment(self) -> dict[str, str]:
        """The variables of environment markers."""
        version = f"{self.python[0]}.{self.python[1]}"
        return {
            "python_version": version,
            "python_full_version": f"{version}.99",  # the newest patch: networkx 3.6.1 refuses 3.14.1 alone
            "platform_machine": self.machine,
            "extra": "",
        }


@dataclass(frozen=True)
class File:
    """A wheel of an index or, without tags, a source distribution."""

    tags: frozenset[Tag]
    requires_python: SpecifierSet


TARGETS = tuple(Target(python, machine) for machine in MACHINES for python in PYTHONS)


def main() -> int:
    """Print the pins without wheels, and counts for each target."""
    parser = argparse.ArgumentParser(description="Check the pins for every supported Python and architecture.")
    parser.add_argument("--index", default="https://pypi.org/simple", help="the package index to read")
    parser.add_argument("--json", type=Path, help="also write the result of each pin and target to this file")
    given = parser.parse_args()
    pins = read_pins()
    with ThreadPoolExecutor(8) as pool:
        pages = dict(zip(pins, pool.map(lambda pin: fetch(given.index, pin), pins.values()), strict=True))
    table = {name: {t.name: offer(pages[name], pins[name], t) for t in TARGETS} for name in pins}
    missing = unpinned(pins)
    if given.json:
        given.json.write_text(json.dumps({"pins": table, "unpinned": missing}, indent=1), encoding="utf-8")
    show(table, pins)
    for line in missing:
        print(f"no pin: {line}")
    return 1 if missing or any("none" in row.values() for row in table.values()) else 0


def read_pins() -> dict[str, Requirement]:
    """All pins by name, including torch and triton."""
    found = [Requirement(TORCH), Requirement(TRITON), *(pin for file in FILES for pin in read_file(file))]
    return {canonicalize_name(pin.name): pin for pin in found}


def read_file(name: str) -> list[Requirement]:
    """The pins of one requirements file."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def fetch(index: str, pin: Requirement) -> list[File]:
    """The files of the pinned version on the index."""
    url = f"{index.rstrip('/')}/{canonicalize_name(pin.name)}/"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": "text/html"}), timeout=60) as answer:
        page = answer.read().decode("utf-8")
    files = [read_link(attributes, html.unescape(text).strip(), pin) for attributes, text in LINK.findall(page)]
    return [file for file in files if file]


def read_link(attributes: str, name: str, pin: Requirement) -> File | None:
    """The file of a link; None if it is yanked, another version, or neither a wheel nor a source distribution."""
    try:
        if name.endswith(".whl"):
            _, version, _, tags = parse_wheel_filename(name)
        else:
            (_, version), tags = parse_sdist_filename(name), frozenset()
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    if "data-yanked" in attributes or not pin.specifier.contains(version, prereleases=True):
        return None
    python = REQUIRES_PYTHON.search(attributes)
    return File(tags, SpecifierSet(html.unescape(python.group(1)) if python else ""))


def offer(files: list[File], pin: Requirement, target: Target) -> str:
    """What the index has for a pin and a target: `wheel`, `sdist`, `none`, or `not needed` by its marker."""
    if pin.marker and not pin.marker.evaluate(target.environment()):
        return "not needed"
    fitting = [file for file in files if target.environment()["python_full_version"] in file.requires_python]
    if any(not file.tags.isdisjoint(target.tags) for file in fitting):
        return "wheel"
    return "sdist" if any(not file.tags for file in fitting) else "none"


def unpinned(pins: dict[str, Requirement]) -> list[str]:
    """Dependencies of pinned packages that have no pin for a target, or a pin with an incompatible version."""
    loose = {canonicalize_name(pin.name) for pin in read_file(NO_DEPENDENCIES)} | {"torch", "triton"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = set()
    for target in TARGETS:
        waiting = [("steelyard", "", Requirement(text)) for text in project["dependencies"]]
        waiting += [("a pin", "", Requirement(name)) for name in sorted(pins.keys() - loose)]
        seen: set[tuple[str, str]] = set()
        while waiting:
            asker, extra, requirement = waiting.pop()
            if requirement.marker and not requirement.marker.evaluate({**target.environment(), "extra": extra}):
                continue
            if lacks(pins, requirement, target):
                lines.add(f"{asker} needs {requirement} on {target.name}")
            for name, wanted in parts(requirement):
                if name not in loose and (name, wanted) not in seen:
                    seen.add((name, wanted))
                    waiting += [(name, wanted, one) for one in requirements_of(name)]
    return sorted(lines)


@cache
def requirements_of(name: str) -> list[Requirement]:
    """The dependencies of an installed package; empty if it is not installed."""
    try:
        return [Requirement(text) for text in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return []


def lacks(pins: dict[str, Requirement], requirement: Requirement, target: Target) -> bool:
    """Whether the pin of a requirement is missing for a target or has an incompatible version."""
    pin = pins.get(canonicalize_name(requirement.name))
    if pin is None or (pin.marker and not pin.marker.evaluate(target.environment())):
        return True
    version = next(iter(pin.specifier)).version
    return not requirement.specifier.contains(version, prereleases=True)


def show(table: dict[str, dict[str, str]], pins: dict[str, Requirement]) -> None:
    """Print the pins that do not have a wheel for every target, and the counts for each target."""
    for name, row in table.items():
        if set(row.values()) != {"wheel"}:
            print(f"{pins[name]}: " + ", ".join(f"{target} {kind}" for target, kind in row.items()))
    print(f"{'target':<14}{'wheel':>7}{'sdist':>7}{'none':>7}{'not needed':>12}")
    for target in TARGETS:
        kinds = [row[target.name] for row in table.values()]
        counts = [kinds.count(kind) for kind in ("wheel", "sdist", "none", "not needed")]
        print(f"{target.name:<14}{counts[0]:>7}{counts[1]:>7}{counts[2]:>7}{counts[3]:>12}")


if __name__ == "__main__":
    sys.exit(main())
