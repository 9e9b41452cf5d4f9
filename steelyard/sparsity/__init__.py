"""Weight sparsity: patterns, one-shot pruning, mask files, mask learning, and kernels for 2:4 weights."""
