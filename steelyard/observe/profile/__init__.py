"""Profiling a run: asking for traces, reading them, and telling what they hold."""
