"""Searches the logs of a host: the last lines, or the last lines that contain a text.

Only the end of a large log is searched, and the answer says how much of it. Secrets and terminal control sequences are
removed from the lines that match, which must match after that, too: a search cannot guess a secret.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.core import secrets
from steelyard.core.file_tail import end_of
from steelyard.observe.error_scan import clean
from steelyard.observe.run_files import listed
from steelyard.observe.run_state import LOGS

STREAMS = (".out", ".err", ".log")
MOST_BYTES, MOST_LINES, LONGEST_LINE = 8 << 20, 400, 2000
MOST_CHECKED = 2000  # matching lines from the end: to clean millions of lines takes many seconds


def hosts(run: Path) -> list[str]:
    """The hosts that have a log."""
    return sorted({path.stem for path in listed(run / LOGS, *STREAMS)})


def search(run: Path, host: str, wanted: str = "", stream: str = "") -> dict[str, Any] | None:
    """The last matching lines of a host's logs; None if it has no such log. Upper and lower case are the same.

    {"logs": [{"stream": "err", "lines": [...], "size": bytes, "searched": bytes, "found": count, "is_all": true}]}
    """
    # The name is only compared, never used as a path.
    paths = [path for path in listed(run / LOGS, *STREAMS) if path.stem == host and stream in ("", path.suffix[1:])]
    return {"logs": [_one(path, wanted.lower()) for path in paths]} if paths else None


def _one(path: Path, wanted: str) -> dict[str, Any]:
    try:
        data, size = end_of(path, MOST_BYTES)
    except OSError:
        data, size = b"", 0
    lines = data.decode("utf-8", errors="replace").split("\n")
    if size > len(data):
        lines = lines[1:]  # incomplete
    matching = [line for line in lines if wanted in line.lower()] if wanted else lines
    # One call for all lines, because one call per line is slow.
    scrubbed = secrets.scrub("\n".join(clean(line)[:LONGEST_LINE] for line in matching[-MOST_CHECKED:])).split("\n")
    found = [line for line in scrubbed if line.strip() and wanted in line.lower()]
    return {
        "stream": path.suffix[1:],
        "lines": found[-MOST_LINES:],
        "size": size,
        "searched": len(data),
        "found": len(found) if wanted else None,
        "is_all": len(matching) <= MOST_CHECKED,
    }
