"""Writes requirements.txt and requirements-dev.txt: the installed versions of all dependencies of the project.

Use: change packages in .venv (`.venv/bin/pip install -U pydantic`), run the tests, then `.venv/bin/python
tools/pin.py`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TORCH = {"torch"}
DEVELOPMENT = (
    "hypothesis",
    "import-linter",
    "lm-eval",
    "mypy",
    "peft",
    "playwright",
    "pre-commit",
    "psycopg",
    "psycopg-binary",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "datasets",
    "tiktoken",
    "setuptools",
    "tensorboard",
    "transformers",
    "trl",
    "wandb",
    "wheel",
)


def main() -> None:
    """Write both files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = closure(TORCH)
    runtime = closure(project["dependencies"]) - TORCH
    write("requirements.txt", runtime, "What steelyard runs on. tools/setup.py installs torch itself, before these.")
    write("requirements-dev.txt", closure(DEVELOPMENT) - runtime - torch, "What steelyard is developed with.")


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of these packages and of all their dependencies on this machine, including those of extras."""
    seen: set[tuple[str, str]] = set()
    waiting = [pair for text in requirements for pair in parts(Requirement(text))]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        needed = [Requirement(text) for text in metadata.requires(name) or []]
        fitting = [one for one in needed if not one.marker or one.marker.evaluate({"extra": extra})]
        waiting += [pair for one in fitting for pair in parts(one)]
    return {name for name, _ in seen}


def parts(requirement: Requirement) -> list[tuple[str, str]]:
    """The package of a requirement, without extra and with each of its extras."""
    return [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]


def write(file: str, names: Iterable[str], title: str) -> None:
    """Write a requirements file with one pin per line."""
    pins = [f"{name}=={re.sub(r'[+].*', '', metadata.version(name))}" for name in sorted(names)]
    (ROOT / file).write_text(f"# {title} Written by tools/pin.py.\n" + "\n".join(pins) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
