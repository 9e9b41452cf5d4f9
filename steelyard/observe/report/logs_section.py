"""The last lines of each host's standard error."""

from __future__ import annotations

from steelyard.core import secrets
from steelyard.core.file_tail import last_lines
from steelyard.core.pages import page
from steelyard.core.run import Run

MOST_HOSTS, MOST_LINES, MOST_LETTERS = 16, 30, 400


def last_errors(run: Run) -> list[str]:
    """The last lines of each host's `logs/*.err`, without secrets; empty without such logs."""
    pieces = []
    paths = sorted((run.path / "logs").glob("*.err"))
    for path in paths[:MOST_HOSTS]:
        lines = [secrets.scrub(line)[:MOST_LETTERS] for line in last_lines(path, MOST_LINES) if line.strip()]
        if lines:
            pieces.append(page.folded(f"{path.stem}: {len(lines)} lines", "\n".join(lines)))
    if pieces and len(paths) > MOST_HOSTS:
        pieces.append(page.paragraph(f"{len(paths) - MOST_HOSTS} more hosts have such a log.", "note"))
    return pieces
