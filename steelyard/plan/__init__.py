"""Which layout? A description of the machines, what a step costs on them, and a search for the best. Needs no torch."""
