"""The report of a run, or a comparison of several, as one HTML file that needs no network."""

from steelyard.observe.report.report_page import render, write

__all__ = ["render", "write"]
