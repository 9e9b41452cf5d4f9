"""Seeing what a run does and did. Reads the run folder and nothing else."""
