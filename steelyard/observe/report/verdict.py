"""What is to be thought of a run, as far as its folder tells."""

from __future__ import annotations

import html

from steelyard.core import secrets
from steelyard.core.run import Run

GOOD, WARNING, BAD = "good", "warning", "bad"
STATES = {
    "finished": (GOOD, "The run took all its steps."),
    "running": (GOOD, "The run is under way."),
    "stopped": (WARNING, "The run stopped where it was asked to; the same command goes on with it."),
    "interrupted": (WARNING, "The run was interrupted; the same command goes on with it."),
    "killed": (BAD, "The run was killed: nobody holds its folder. The same command goes on from the last checkpoint."),
    "failed": (BAD, "The run failed."),
    "created": (WARNING, "The run has not begun."),
}


def verdict(run: Run, name: str) -> str:
    """One box: how the run stands, and what to do about it."""
    kind, words = STATES.get(run.state, (WARNING, run.state))
    error = run.manifest().get("error")
    if error and kind == BAD:
        words += f"\n{secrets.scrub(str(error))}"
    return f'<div class="verdict {kind}"><b>{html.escape(name)}</b>: {html.escape(words)}</div>'
