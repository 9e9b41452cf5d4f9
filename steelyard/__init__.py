"""Steelyard: text and GPUs in, a trained and published language model out."""

__version__ = "0.1.0"
