"""Sparse models: patterns, one-shot pruning, masks that are learned, kernels. Training itself stays in `train/`."""
