"""Using a trained model: letting it write, measuring its perplexity, scoring it on tasks."""
