"""The interface of all tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.safe_parse import read_json_object

END_OF_DOCUMENT = "<|endoftext|>"
# Names of the end-of-document token in common vocabularies, most likely first.
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
RARE = "\U00013000\ua66e\U00012000"  # An Egyptian, a Slavonic and a Sumerian letter, which few vocabularies have.


class Tokenizer(ABC):
    """Encodes text to ids and decodes ids to text."""

    kind: str
    source: str
    vocab_size: int
    end_id: int | None
    fingerprint: str

    @property
    def end_of_document(self) -> int:
        """The id that ends a document."""
        if self.end_id is None:
            raise UserError(f"the tokenizer {self.source} has no end-of-document token")
        return self.end_id

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of text outside the vocabulary; None if all text can be encoded, as with bytes as tokens."""
        unknown = self.model_unknown_id()
        return unknown if unknown in self.encode(RARE) else None

    @cached_property
    def drops_unknown(self) -> bool:
        """Whether text outside the vocabulary is dropped without a trace."""
        return not self.encode(RARE)

    @abstractmethod
    def model_unknown_id(self) -> int | None:
        """The id that the model has for unknown text, even if it can encode all text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def framed(self, text: str) -> list[int]:
        """The ids of a text with the special tokens that this tokenizer adds, if any."""
        return self.encode(text)

    @abstractmethod
    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and the span of characters of each, as start and end.

        Special tokens in the text, which chat templates write, are recognized.
        """

    def special(self, role: str) -> str | None:
        """The text of the token with a role (`bos_token`, `eos_token`, ...)."""
        return None

    def special_id(self, role: str) -> int | None:
        """The id of the token with a role."""
        return None

    def chat_template(self) -> str | None:
        """The Jinja chat template, if the tokenizer has one."""
        return None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The ids of many texts, with the fastest implementation, on one thread."""

    @abstractmethod
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, without special tokens or with their names (`<unk>`, `</s>`, ...)."""

    @abstractmethod
    def pieces(self, text: str) -> list[str]:
        """The tokens of a text as strings."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a folder that `transformers` can load and that gives the same ids."""

    def check_ids(self, ids: npt.NDArray[Any]) -> None:
        """Raise if an id is outside the vocabulary."""
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"the id {int(ids.max())} is outside the vocabulary of {self.vocab_size}", where=self.source
            )


def template_in(config: dict[str, Any], folder: Path | None) -> str | None:
    """The chat template of a tokenizer: a separate file in the folder, or a value in its config."""
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return files.inside(folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # Several templates by name; the one for plain conversations is `default`.
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def write_template(tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Write the chat template to a separate file, unless the config that is written has it."""
    template = tokenizer.chat_template()
    if template is not None and template != template_in(config, None):
        files.write_text(folder / "chat_template.jinja", template)


def as_ids(ids: Any) -> npt.NDArray[np.int32]:
    """Ids as an array."""
    return np.asarray(ids, dtype=np.int32)


def read_config(path: Path) -> dict[str, Any]:
    """A `tokenizer_config.json`, or an empty dict if there is none."""
    return read_json_object(files.inside(path)) if path.is_file() else {}
