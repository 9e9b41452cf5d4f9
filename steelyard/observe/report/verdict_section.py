"""The verdicts on a run, as in `steelyard watch`."""

from __future__ import annotations

import html

from steelyard.core import secrets
from steelyard.core.run import Run
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import verdict_view
from steelyard.observe.verdict import judge

SECONDS_SEARCHED = 5.0  # search time for the first error in error logs, which may be very long


def judged(run: Run) -> RunState:
    """The state of a run after its error logs were searched."""
    return RunState(run.path).refresh().search(SECONDS_SEARCHED)


def boxes(state: RunState, name: str) -> str:
    """A box for each verdict, with what to do about it."""
    drawn = []
    for found in judge(state):
        reported = verdict_view(found, state)
        advice = (
            "" if found.level == "ok" else f"\nTo do: {reported['what_to_do']}"
        )  # The advice of a good end is to read the report.
        words = secrets.scrub(reported["message"] + advice)
        drawn.append(f'<div class="verdict {found.level}"><b>{html.escape(name)}</b>: {html.escape(words)}</div>')
    return "".join(drawn)
