"""Is this machine fit? Checks with a plain verdict each, repairs that can be taken back, and logs explained.

Nothing here imports torch: what only torch knows is asked in a process of its own (`ask/`).
"""
