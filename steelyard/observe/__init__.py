"""Monitoring and reports of runs. Reads only the run folder."""
