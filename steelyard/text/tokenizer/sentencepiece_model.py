"""SentencePiece models, run by the `sentencepiece` library itself.

What the library does not tell is read from the file, a protocol buffer: `pieces` (field 1) with piece, score and
type, and the trainer's and normalizer's settings (fields 2 and 3).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy.typing as npt

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.text.tokenizer.tokenizer import Tokenizer, as_ids, read_config, template_in

UNIGRAM, BPE = 1, 2  # types of model
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # types of piece
# Classes of `transformers` that begin a text with a token unless they are told not to.
BEGINNING_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer")


class SentencePieceTokenizer(Tokenizer):
    """A `.model` file."""

    def __init__(self, model: bytes, source: str, begins: bool = False) -> None:
        import sentencepiece

        self.model, self.source = model, source
        self.inner = sentencepiece.SentencePieceProcessor()
        try:
            self.inner.LoadFromSerializedProto(model)
            self._read_settings()
        except Exception:  # What the library says is a line of its own source.
            raise UserError("this is no SentencePiece model, or a damaged one", where=source) from None
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size = self.inner.get_piece_size()
        self.end_id = self.inner.eos_id() if self.inner.eos_id() >= 0 else None
        self._before = [self.inner.bos_id()] if begins and self.inner.bos_id() >= 0 else []

    def _read_settings(self) -> None:
        parts = list(_fields(self.model))
        trainer, normalizer = (dict(_fields(b"".join(v for n, v in parts if n == part))) for part in (2, 3))
        pieces = [dict(_fields(value)) for number, value in parts if number == 1]
        kind = trainer.get(3, UNIGRAM)
        self.kind = {UNIGRAM: "SentencePiece Unigram", BPE: "SentencePiece BPE"}.get(kind, "SentencePiece")
        self.controls = {
            piece[1].decode(): number for number, piece in enumerate(pieces) if piece.get(3, NORMAL) == CONTROL
        }
        self.has_bytes = any(piece.get(3, NORMAL) == BYTE for piece in pieces)
        self.has_symbols = any(piece.get(3, NORMAL) == USER_DEFINED for piece in pieces)
        # The compiled character map, whether a space is put in front, and whether extra spaces are removed.
        self.normalizer = normalizer.get(2, b""), bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(text)
        return ids

    def framed(self, text: str) -> list[int]:
        return self._before + self.encode(text)

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        start = 0
        for part in re.split("(" + "|".join(map(re.escape, self.controls)) + ")", text) if self.controls else [text]:
            if part in self.controls:
                ids.append(self.controls[part])
                places.append((start, start + len(part)))
            elif part:
                found = [dict(_fields(value)) for number, value in _fields(self._described(part)) if number == 2]
                characters = _characters_before(part)
                ids += [piece.get(2, 0) for piece in found]
                places += [tuple(start + characters[piece.get(end, 0)] for end in (4, 5)) for piece in found]
            start += len(part)
        return ids, places

    def _described(self, text: str) -> bytes:
        """The library's own account of how it cuts a text: in field 2 each piece, with id (2) and bytes (4 to 5)."""
        account: bytes = self.inner.encode(text, out_type="serialized_proto")
        return account

    def chat_template(self) -> str | None:
        path = Path(self.source)
        return (
            template_in(read_config(path.with_name("tokenizer_config.json")), path.parent) if path.is_file() else None
        )

    def special(self, role: str) -> str | None:
        number = self.special_id(role)
        name: str | None = None if number is None else self.inner.id_to_piece(number)
        return name

    def special_id(self, role: str) -> int | None:
        number: int = {"bos_token": self.inner.bos_id(), "eos_token": self.inner.eos_id()}.get(role, -1)
        return number if number >= 0 else None

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        return [as_ids(ids) for ids in self.inner.encode(list(texts), num_threads=1)]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.inner.decode([int(number) for number in ids])
        return text

    def pieces(self, text: str) -> list[str]:
        pieces: list[str] = self.inner.encode(text, out_type=str)
        return pieces

    def save(self, folder: Path) -> None:
        """Ship the model itself, or an exact copy of its rules.

        `transformers` has one tokenizer that hands text to SentencePiece untouched; its name speaks of another model,
        but it adds nothing. When decoding it shows byte pieces by their names, so that a model with byte fallback is
        rebuilt as a `tokenizer.json` where that is exact.
        """
        named = {"unk_token": self.inner.unk_id(), "bos_token": self.inner.bos_id(), "eos_token": self.inner.eos_id()}
        config: dict[str, Any] = {
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            **{key: self.inner.id_to_piece(number) if number >= 0 else None for key, number in named.items()},
        }
        if self.has_bytes and self.kind == "SentencePiece BPE" and not self.normalizer[0] and not self.has_symbols:
            from steelyard.text.tokenizer.sentencepiece_to_json import rebuilt

            copy = rebuilt(self)
            copy.config = config
            copy.save(folder)
        else:
            config |= {"tokenizer_class": "BertGenerationTokenizer", "pad_token": None, "sep_token": None}
            files.write_json(folder / "tokenizer_config.json", config)
        with files.atomic_file(folder / "spiece.model", "wb") as file:
            file.write(self.model)

    def write(self, prefix: Path) -> list[str]:
        """Write PREFIX.model and, for people, PREFIX.vocab: a piece and its score a line."""
        model, vocab = Path(f"{prefix}.model"), Path(f"{prefix}.vocab")
        numbers = range(self.vocab_size)
        lines = (f"{self.inner.id_to_piece(number)}\t{self.inner.get_score(number):g}\n" for number in numbers)
        files.write_text(vocab, "".join(lines))
        with files.atomic_file(model, "wb") as file:
            file.write(self.model)
        return [str(model), str(vocab)]


def from_file(path: Path) -> SentencePieceTokenizer:
    """Load a `.model` file. The configuration beside it, if there is one, says whether texts begin with a token."""
    config = read_config(path.with_name("tokenizer_config.json"))
    begins = config.get("add_bos_token", config.get("tokenizer_class") in BEGINNING_CLASSES)
    return SentencePieceTokenizer(path.read_bytes(), str(path), begins=bool(begins))


def _characters_before(text: str) -> list[int]:
    """For each byte of a text in UTF-8, and its end, how many characters begin before it."""
    starts = (byte & 0xC0 != 0x80 for byte in text.encode())
    return [0, *accumulate(starts)]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer message, by number; nested messages and strings as bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield number, value
        elif wire == 2:
            length, place = _varint(message, place)
            yield number, message[place : place + length]
            place += length
        elif wire in (1, 5):
            width = 8 if wire == 1 else 4
            yield number, struct.unpack_from("<d" if wire == 1 else "<f", message, place)[0]
            place += width
        else:
            raise ValueError(f"wire type {wire}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
