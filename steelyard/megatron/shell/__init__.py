"""Interprets bash scripts without running programs: statements, expansions, conditions, and the commands found."""
