"""Hyperparameter search: a search space, trials that are short runs, and a study that survives its workers."""
