"""The verdicts on a run, as in `steelyard watch`."""

from __future__ import annotations

import html

from steelyard.core import secrets
from steelyard.core.run import Run
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import told_of
from steelyard.observe.verdict import judge

SECONDS_SEARCHED = 5.0  # search time for the first error in error logs, which may be very long
STYLES = {"ok": "good", "waiting": "warning", "warning": "warning", "wrong": "bad"}


def verdict(run: Run, name: str) -> str:
    """A box for each verdict, with what to do about it."""
    boxes = []
    state = RunState(run.path).refresh().search(SECONDS_SEARCHED)
    for found in judge(state):
        reported = told_of(found, state)
        advice = (
            "" if found.level == "ok" else f"\nTo do: {reported['what_to_do']}"
        )  # The advice of a good end is to read the report.
        words = secrets.scrub(reported["message"] + advice)
        kind = STYLES.get(found.level, "warning")
        boxes.append(f'<div class="verdict {kind}"><b>{html.escape(name)}</b>: {html.escape(words)}</div>')
    return "".join(boxes)
