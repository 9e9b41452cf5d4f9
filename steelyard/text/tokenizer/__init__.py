"""One interface to all kinds of tokenizers: load one, train one, export one to a Hugging Face folder."""

from steelyard.text.tokenizer.find_tokenizer import load_tokenizer
from steelyard.text.tokenizer.hf_export import Difference, differences, export_hf, refuse_folder
from steelyard.text.tokenizer.tokenizer import END_OF_DOCUMENT, Tokenizer
from steelyard.text.tokenizer.train_tokenizer import SentencePieceOptions, train_byte_bpe, train_sentencepiece
from steelyard.text.tokenizer.unknown_tokens import TooManyUnknownError, count_unknown, report_unknown

__all__ = [
    "END_OF_DOCUMENT",
    "Difference",
    "SentencePieceOptions",
    "Tokenizer",
    "TooManyUnknownError",
    "count_unknown",
    "differences",
    "export_hf",
    "load_tokenizer",
    "refuse_folder",
    "report_unknown",
    "train_byte_bpe",
    "train_sentencepiece",
]
