"""Tokenizers of every kind behind one face: load one, train one, export one to a Hugging Face folder."""

from steelyard.text.tokenizer.base import END_OF_DOCUMENT, Tokenizer
from steelyard.text.tokenizer.export import Difference, differences, export
from steelyard.text.tokenizer.load import load
from steelyard.text.tokenizer.train import SentencePieceOptions, train_byte_bpe, train_sentencepiece

__all__ = [
    "END_OF_DOCUMENT",
    "Difference",
    "SentencePieceOptions",
    "Tokenizer",
    "differences",
    "export",
    "load",
    "train_byte_bpe",
    "train_sentencepiece",
]
