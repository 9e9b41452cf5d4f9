"""Evaluation of trained models: text generation, perplexity, and benchmark tasks."""
