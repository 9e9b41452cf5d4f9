"""The table of a run's attempts."""

from __future__ import annotations

from datetime import UTC, datetime

from steelyard.core import secrets, units
from steelyard.core.pages import page
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import attempts_view

HEAD = ["attempt", "started", "took", "steps", "repeated", "hosts", "devices", "layout", "end"]


def attempts_section(state: RunState) -> list[str]:
    """One row per attempt: when and where it ran, which steps, in which layout, and how it ended."""
    rows = []
    for one in attempts_view(state):
        started, ended = one["started"], one["ended"]
        when = "" if started is None else datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        took = "" if started is None or ended is None else units.duration(max(0.0, ended - started))
        steps = (
            "" if one["step"] is None else f"{one['step']} to {'' if one['last_step'] is None else one['last_step']}"
        )
        layout = f"{one['layout']} ({one['changed']})" if one["changed"] else one["layout"]
        number = f"{one['number']}, {one['kind']}" if one["number"] > 1 else str(one["number"])
        cells = [when, took, steps, str(one["repeated"] or ""), ", ".join(one["hosts"]), one["devices"], layout]
        rows.append([number, *map(secrets.scrub, cells), one["end"]])
    if not rows:
        return [page.paragraph("No rank has started yet.", "note")]
    return [f'<div class="scroll">{page.table(rows, head=HEAD)}</div>']
