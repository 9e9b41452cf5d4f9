"""Checks of this machine, repairs that can be undone, and explanations of errors in logs.

Nothing here imports torch: facts that only torch knows are read in a subprocess (`probes/`).
"""
