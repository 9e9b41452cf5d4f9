"""The section of a report that tells what a profiler saw."""

from __future__ import annotations

from steelyard.core.run import Run


def profile_section(run: Run) -> list[str]:
    """Nothing yet."""
    return []
