"""Facts about the machine's Python and torch, read once in a subprocess."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.doctor.machine import Machine, version_in
from steelyard.doctor.probes import library, torch_facts

SECONDS_TO_IMPORT = 180  # for a first import of torch from a network filesystem


@dataclass(frozen=True)
class PythonInfo:
    """The facts; empty if the Python did not run."""

    answers: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why there are no facts."""

    @property
    def python(self) -> tuple[int, ...] | None:
        """The interpreter's version."""
        version = self.answers.get("python")
        return None if version is None else tuple(version)

    @property
    def torch(self) -> str | None:
        """torch's version; None if it is not installed or cannot be imported."""
        return self.answers.get("torch")

    @property
    def torch_cuda(self) -> tuple[int, ...] | None:
        """The CUDA version that torch was built for; None for a CPU-only build."""
        return version_in(self.answers.get("torch_cuda") or "")

    @property
    def gpus(self) -> list[str]:
        """The names of the GPUs that torch sees."""
        return self.answers.get("gpus") or []

    def error(self, name: str) -> str | None:
        """Why a fact could not be read."""
        errors: dict[str, str] = self.answers.get("errors", {})
        return errors.get(name)

    def package(self, name: str) -> str | None:
        """The version of an optional package."""
        versions: dict[str, Any] = self.answers.get("packages") or {}
        return versions.get(name)


def read_python_info(machine: Machine) -> PythonInfo:
    """Read the facts from the machine's Python."""
    # Packages may print while they are imported: the facts are the last line.
    command = [machine.python, _script(torch_facts.__file__)]
    answer = machine.run(command, seconds=SECONDS_TO_IMPORT, extra={"PYTHONWARNINGS": "ignore"})
    if answer is None:
        return PythonInfo(problem=f"{machine.python} does not exist")
    try:
        return PythonInfo(json.loads(answer.out.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return PythonInfo(problem=answer.gist)


def load_library(machine: Machine, path: str, family: str) -> dict[str, Any]:
    """Whether a library loads, and its version. A crash of the subprocess counts as an error."""
    answer = machine.run([machine.python, "-S", _script(library.__file__), path, family])
    try:
        found: dict[str, Any] = json.loads(answer.out) if answer else {"loads": False, "error": "Python does not run"}
    except ValueError:
        assert answer is not None
        return {"loads": False, "error": f"loading it crashed the process: {answer.gist}"}
    return found


def _script(path: str | None) -> str:
    assert path is not None
    return path


@dataclass(frozen=True)
class Installed:
    """The installed torch, read from its files without importing it."""

    folder: Path
    version: str
    cuda: tuple[int, ...] | None


def installed_torch(machine: Machine) -> Installed | None:
    """The torch that the machine's Python would import."""
    for packages in machine.packages:
        text = packages / "torch" / "version.py"
        if text.is_file():
            source = text.read_text(encoding="utf-8", errors="replace")
            version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", source, re.MULTILINE)
            cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", source, re.MULTILINE)
            return Installed(text.parent, version[1] if version else "unknown", version_in(cuda[1]) if cuda else None)
    return None
