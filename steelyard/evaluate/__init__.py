"""Using a trained model: loading it from a checkpoint and letting it write."""
