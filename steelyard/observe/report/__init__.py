"""One HTML file that tells a run's story, or compares several, and opens without a network."""

from steelyard.observe.report.whole import render, write

__all__ = ["render", "write"]
