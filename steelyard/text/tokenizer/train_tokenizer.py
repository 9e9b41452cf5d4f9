"""Train tokenizers: byte-level BPE with `tokenizers`, Unigram and BPE with SentencePiece."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from steelyard.core.errors import UserError
from steelyard.text.tokenizer.json_file import JsonTokenizer
from steelyard.text.tokenizer.sentencepiece_model import SentencePieceTokenizer
from steelyard.text.tokenizer.tokenizer import END_OF_DOCUMENT

# SentencePiece silently drops longer lines. Splitting keeps them, and loses at most the pieces across a split.
LONGEST_LINE = 4000
# Sums of such scores are exact in single precision, for about 7,000 tokens, so that all libraries resolve ties alike.
SCORE_STEP = 2.0**-8


@dataclass(frozen=True)
class SentencePieceOptions:
    """Options for training a SentencePiece vocabulary."""

    type: str = "unigram"  # or bpe
    character_coverage: float = 0.9995
    sample: int = 0
    byte_fallback: bool = False
    split_digits: bool = False
    symbols: tuple[str, ...] = ()
    keep_whitespace: bool = False
    may_be_smaller: bool = False  # than requested, if the text has fewer pieces


def train_byte_bpe(texts: Iterable[str], vocab_size: int, symbols: Iterable[str] = ()) -> JsonTokenizer:
    """Train a byte-level BPE vocabulary. Every byte is a token, so there is no unknown text."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = [END_OF_DOCUMENT, *symbols]
    if vocab_size < len(alphabet) + len(specials):
        least = len(alphabet) + len(specials)
        raise UserError(f"a byte-level vocabulary of {vocab_size} is too small", hint=f"use {least} or more")
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(_not_empty(texts), trainer)
    config = {"bos_token": END_OF_DOCUMENT, "eos_token": END_OF_DOCUMENT, "unk_token": END_OF_DOCUMENT}
    return JsonTokenizer(inner, "the trained vocabulary", config)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, options: SentencePieceOptions) -> SentencePieceTokenizer:
    """Train a SentencePiece vocabulary with <unk>, <s> and </s> as its first three pieces."""
    import sentencepiece

    model = io.BytesIO()
    stopped_by: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_recording_errors(_lines(_not_empty(texts)), stopped_by),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=not options.may_be_smaller,
            model_type=options.type,
            character_coverage=options.character_coverage,
            input_sentence_size=options.sample,
            shuffle_input_sentence=options.sample > 0,
            byte_fallback=options.byte_fallback,
            split_digits=options.split_digits,
            user_defined_symbols=list(options.symbols),
            # With byte fallback no character map is needed, and without a map the export is exact.
            normalization_rule_name="identity" if options.keep_whitespace or options.byte_fallback else "nmt_nfkc",
            remove_extra_whitespaces=not options.keep_whitespace,
            max_sentence_length=4 * LONGEST_LINE + 4,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if stopped_by:
            raise stopped_by[0] from None
        raise _translated(str(error), vocab_size) from None
    trained = SentencePieceTokenizer(model.getvalue(), "the trained vocabulary")
    return trained if options.type == "bpe" else trained.with_rounded_scores(SCORE_STEP)


def _translated(message: str, vocab_size: int) -> UserError:
    reason = message.split("] ", 1)[-1].strip() or message
    if "too high" in reason or "Vocabulary size" in reason:
        return UserError(f"a vocabulary of {vocab_size} does not fit this text: {reason}")
    return UserError(f"SentencePiece could not train a vocabulary: {reason}")


def _recording_errors(lines: Iterator[str], stopped_by: list[BaseException]) -> Iterator[str]:
    """Yield the lines and record the error that stops them: SentencePiece replaces any error, even Ctrl-C."""
    try:
        yield from lines
    except GeneratorExit:
        raise
    except BaseException as error:
        stopped_by.append(error)
        raise


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), LONGEST_LINE):
                yield line[start : start + LONGEST_LINE]


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    characters = 0
    for text in texts:
        characters += len(text)
        yield text
    if not characters:
        raise UserError("the corpus is empty: nothing to train a vocabulary on")
