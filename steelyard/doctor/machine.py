"""The machine that doctor checks: an environment, a file tree, a Python, and a way to run programs.

Checks access nothing else, so tests can build a broken machine from folders and small programs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from steelyard.core.printable import without_control

HELP = re.compile(r"(See|Run) .* --help")
TIMED_OUT = 124  # as in timeout(1)
WSL_PROGRAMS = "/usr/lib/wsl/lib"


@dataclass(frozen=True)
class Answer:
    """The output of a program."""

    code: int
    out: str
    err: str

    @property
    def is_good(self) -> bool:
        """Whether it exited with 0."""
        return self.code == 0

    @property
    def gist(self) -> str:
        """Its last line, where programs usually report the error, except a line that only refers to --help."""
        if self.code == TIMED_OUT and not self.err.strip():
            return "it timed out"
        for text in (self.err, self.out):
            lines = [line.strip() for line in without_control(text).splitlines() if line.strip()]
            informative = [line for line in lines if not HELP.match(line)] or lines
            if informative:
                return informative[-1][:300]
        return f"exit code {self.code}"


@dataclass(frozen=True)
class Machine:
    """The paths and the environment that checks use, and a way to run programs."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    """The root of /proc, /sys, /etc, /dev and the default library folders."""
    python: str = sys.executable
    packages: tuple[Path, ...] = ()
    """Folders in which that Python finds packages, such as torch."""
    folder: Path = field(default_factory=Path.cwd)
    """The folder in which runs are written."""

    def at(self, path: str) -> Path:
        """A system path, below the root."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """The content of a small system file; None if it cannot be read."""
        with suppress(OSError):
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        return None

    def which(self, program: str) -> str | None:
        """The path of a program. WSL has the GPU programs in a folder that may not be on PATH."""
        folders = [self.environment.get("PATH", os.defpath), str(self.at(WSL_PROGRAMS))]
        return shutil.which(program, path=os.pathsep.join(folders))

    def run(self, command: Sequence[str], seconds: float = 20, extra: Mapping[str, str] | None = None) -> Answer | None:
        """Run a program and wait for it; None if it is not installed. On a timeout its process group is killed."""
        program = self.which(command[0])
        if program is None:
            return None
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                env=dict(self.environment) | dict(extra or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return Answer(126, "", f"{program}: {error.strerror or error}")
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            out, err = process.communicate()
            return Answer(TIMED_OUT, out, err)
        except BaseException:
            _end(process)
            process.communicate()
            raise
        return Answer(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def version_in(text: str) -> tuple[int, ...] | None:
    """The first version number in a text: `release 12.4, V12.4.131` is (12, 4)."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return None if found is None else tuple(int(part) for part in found[0].split("."))


def dotted(version: Sequence[int]) -> str:
    """A version in dotted notation."""
    return ".".join(map(str, version))


def here() -> Machine:
    """This machine, with the current Python."""
    packages = [Path(entry) for entry in sys.path if entry]
    return Machine(dict(os.environ), packages=tuple(path for path in packages if path.is_dir()))
