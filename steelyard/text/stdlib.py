"""A corpus that every machine has: the source files of Python's standard library."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from steelyard.core.files import atomic_file

# Test suites and installed packages differ between machines; character tables and help topics are not useful text.
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}


def write_corpus(path: Path) -> int:
    """Write one document per source file to a jsonl, and return their number."""
    root = Path(sysconfig.get_path("stdlib"))
    count = 0
    with atomic_file(path) as file:
        for source in sorted(root.rglob("*.py")):
            if LEFT_OUT.isdisjoint(source.relative_to(root).parts):
                text = source.read_text(encoding="utf-8", errors="replace")
                if text.strip():
                    file.write(json.dumps({"text": text, "file": str(source.relative_to(root))}) + "\n")
                    count += 1
    return count
