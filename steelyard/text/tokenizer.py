"""Tokenizers: training a byte-level BPE, and loading one back.

A tokenizer is a folder in Hugging Face's form: `tokenizer.json` with the vocabulary, `tokenizer_config.json` with the
names of the special tokens, so that `transformers` loads it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core import files
from steelyard.core.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, inner: tokenizers.Tokenizer, end_of_document: str = END_OF_DOCUMENT) -> None:
        self.inner = inner
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        end = inner.token_to_id(end_of_document)
        if end is None:
            raise UserError(f"the tokenizer has no end-of-document token {end_of_document}")
        self.end_of_document: int = end

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts at once."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens show as nothing."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE vocabulary. Every byte is a token, so no text is ever unknown."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise UserError(
            f"a byte-level vocabulary of {vocab_size} is too small", mend=f"ask for more than {len(alphabet)}"
        )
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    seen = _Counted(texts)
    inner.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise UserError("the corpus is empty: there is nothing to learn a vocabulary from")
    return Tokenizer(inner)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer as a folder. The vocabulary goes last: a folder that has it is whole."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
        "unk_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    files.write_json(folder / "tokenizer_config.json", config)
    files.write_text(folder / "tokenizer.json", tokenizer.inner.to_str(pretty=True))


def load(folder: str | Path) -> Tokenizer:
    """Load a tokenizer from its folder."""
    from tokenizers import Tokenizer as Inner

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"there is no tokenizer in {folder}: no tokenizer.json", mend="steelyard tokenizer train makes one"
        )
    try:
        inner = Inner.from_file(str(path))
    except Exception as error:
        raise UserError(f"the tokenizer cannot be read: {error}", where=str(path)) from None
    return Tokenizer(inner, _end_of_document(path.with_name("tokenizer_config.json")))


def _end_of_document(config: Path) -> str:
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except FileNotFoundError:
        return END_OF_DOCUMENT
    except ValueError as error:
        raise UserError(f"this is not JSON: {error}", where=str(config)) from None
    return str(token["content"] if isinstance(token, dict) else token or END_OF_DOCUMENT)


class _Counted:
    """Passes texts on and remembers how much there was."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = iter(texts)
        self.characters = 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> str:
        text = next(self.texts)
        self.characters += len(text)
        return text
