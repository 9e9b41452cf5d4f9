"""Weights that are zero on purpose: patterns, one-shot pruning, masks as files, masks learned in training."""
