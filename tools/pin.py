"""Writes requirements.txt and requirements-dev.txt: the exact versions installed here of everything the project needs.

Use: install what you want in .venv (`.venv/bin/pip install -U pydantic`), run the tests, then `.venv/bin/python
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
    """The names of these packages and all they need, on this machine."""
    names: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        waiting += [Requirement(text) for text in metadata.requires(name) or []]
    return names


def write(file: str, names: Iterable[str], title: str) -> None:
    """One pinned package a line."""
    pins = [f"{name}=={re.sub(r'[+].*', '', metadata.version(name))}" for name in sorted(names)]
    (ROOT / file).write_text(f"# {title} Written by tools/pin.py.\n" + "\n".join(pins) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
