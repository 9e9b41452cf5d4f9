"""Profiling: starts profiled runs, reads traces and summarizes them."""
