"""The planner: describe a cluster, predict the time and memory of a step on it, and search for layouts. No torch."""
