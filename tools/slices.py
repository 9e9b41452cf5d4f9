"""Resumable work on a machine with limited time: results are written after every step, and the next call continues.

Used by `tools/gpu_tests.py` and `benchmarks/owed_on_gpu.py`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FINISHED = ("done", "passed")


class Record:
    """A JSON file with a header and a list of entries, one for each step. It is replaced atomically, by rename.

    An entry has at least `name` and `state`: running, done, passed, failed, out of time, or left out (and why).
    """

    def __init__(self, path: Path, entries: str, **header: Any) -> None:
        self.path, self.entries = path, entries
        self.known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {entries: []}
        self.known = {**header, **{key: self.known[key] for key in self.known if key not in header}}

    def state(self, name: str) -> str:
        """The state of a step; a step that is not in the file counts as interrupted (`running`)."""
        return next((each["state"] for each in self.known[self.entries] if each["name"] == name), "running")

    def is_due(self, name: str, again: bool) -> bool:
        """Whether a step was not run, was interrupted, or (with `again`) did not succeed."""
        state = self.state(name)
        return state == "running" or state.startswith("left out") or (again and state not in FINISHED)

    def put(self, entry: dict[str, Any]) -> None:
        """Write an entry; it replaces an earlier one of the same name."""
        others = [each for each in self.known[self.entries] if each["name"] != entry["name"]]
        self.known[self.entries] = [*others, entry]
        partial = self.path.with_name(f".{self.path.name}.part")
        partial.write_text(json.dumps(self.known, indent=1) + "\n")
        partial.replace(self.path)


def device() -> str:
    """The GPU and its driver, or else the CPU."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of packages; "none" for one that is not installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
