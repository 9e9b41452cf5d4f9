"""One HTML file that tells a run's story, or compares several, and opens without a network."""

from steelyard.observe.report.report_page import render, write

__all__ = ["render", "write"]
