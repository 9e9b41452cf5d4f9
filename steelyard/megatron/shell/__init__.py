"""Reading bash scripts without running them: statements, expansions, conditions, and the commands that come out."""
