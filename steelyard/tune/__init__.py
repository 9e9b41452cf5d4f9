"""Which settings? A search space, trials that are real short runs, and a study that outlives whoever runs it."""
