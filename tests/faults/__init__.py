"""Fault injection: mutated files, killed processes and fuzzed input. `python -m tests.faults` runs the large budget."""
