"""SentencePiece models, run by the `sentencepiece` library.

Settings that the library does not expose are read from the file, a protocol buffer: `pieces` (field 1) with piece,
score and type, and the settings of the trainer and the normalizer (fields 2 and 3).
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
from steelyard.text.tokenizer.tokenizer import Tokenizer, as_ids, read_config, template_in, write_template

UNIGRAM, BPE = 1, 2  # types of model
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # types of piece
# Classes of `transformers` that add a BOS token by default.
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
        except Exception:  # The message of the library is only a line of its source code.
            raise UserError("this is not a SentencePiece model, or it is damaged", where=source) from None
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
        self.symbols = {piece[1].decode() for piece in pieces if piece.get(3, NORMAL) == USER_DEFINED}
        # The compiled character map, whether a space is added at the start, and whether extra spaces are removed.
        self.normalizer = normalizer.get(2, b""), bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(text)
        return ids

    def framed(self, text: str) -> list[int]:
        return self._before + self.encode(text)

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        start = 0
        for part in re.split("(" + "|".join(map(re.escape, self.controls)) + ")", text) if self.controls else [text]:
            if part in self.controls:
                ids.append(self.controls[part])
                spans.append((start, start + len(part)))
            elif part:
                pieces = [dict(_fields(value)) for number, value in _fields(self._encoded_proto(part)) if number == 2]
                characters = _characters_before(part)
                ids += [piece.get(2, 0) for piece in pieces]
                spans += [tuple(start + characters[piece.get(end, 0)] for end in (4, 5)) for piece in pieces]
            start += len(part)
        return ids, spans

    def _encoded_proto(self, text: str) -> bytes:
        """The encoded text as a protocol buffer: field 2 has each piece, with id (2) and byte range (4 to 5)."""
        proto: bytes = self.inner.encode(text, out_type="serialized_proto")
        return proto

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

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        numbers = [int(number) for number in ids]
        if skip_special_tokens:
            text: str = self.inner.decode(numbers)
            return text
        data = b"".join(self._bytes_of(number) for number in numbers).decode(errors="replace")
        return data.removeprefix(" ") if self.normalizer[1] else data

    def _bytes_of(self, number: int) -> bytes:
        piece: str = self.inner.id_to_piece(number)
        return bytes([int(piece[3:5], 16)]) if self.inner.is_byte(number) else piece.replace("\u2581", " ").encode()

    def model_unknown_id(self) -> int | None:
        number: int = self.inner.unk_id()
        return number

    def pieces(self, text: str) -> list[str]:
        pieces: list[str] = self.inner.encode(text, out_type=str)
        return pieces

    def save(self, folder: Path) -> None:
        """Write a `tokenizer.json` for `transformers` and others, and the model itself."""
        from steelyard.text.tokenizer.sentencepiece_to_json import rebuilt

        special = {"unk_token": self.inner.unk_id(), "bos_token": self.inner.bos_id(), "eos_token": self.inner.eos_id()}
        copy = rebuilt(self)
        copy.config = {
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            **{key: self.inner.id_to_piece(number) if number >= 0 else None for key, number in special.items()},
        }
        with files.atomic_file(folder / "tokenizer.model", "wb") as file:
            file.write(self.model)
        write_template(self, copy.config, folder)
        copy.save(folder)

    def with_rounded_scores(self, step: float) -> SentencePieceTokenizer:
        """The tokenizer with the score of each piece (field 2 of field 1) rounded to a multiple of `step`."""
        model = bytearray(self.model)
        for number, _, start, end in _ranges(self.model):
            for field, _, first, _ in _ranges(self.model[start:end]) if number == 1 else ():
                if field == 2:
                    score = struct.unpack_from("<f", model, start + first)[0]
                    struct.pack_into("<f", model, start + first, round(score / step) * step)
        return SentencePieceTokenizer(bytes(model), self.source)

    def with_pieces(self, scores: dict[str, float]) -> SentencePieceTokenizer:
        """The tokenizer with more pieces: the repeated field 1, with piece and score, may also be at the end."""
        model = [self.model]
        for name, score in scores.items():
            piece = _with_length(name.encode()) + b"\x15" + struct.pack("<f", score)
            model.append(_with_length(piece))
        return SentencePieceTokenizer(b"".join(model), self.source, begins=bool(self._before))

    def write(self, prefix: Path) -> list[str]:
        """Write PREFIX.model and the human-readable PREFIX.vocab, with a piece and its score per line."""
        model, vocab = Path(f"{prefix}.model"), Path(f"{prefix}.vocab")
        numbers = range(self.vocab_size)
        lines = (f"{self.inner.id_to_piece(number)}\t{self.inner.get_score(number):g}\n" for number in numbers)
        files.write_text(vocab, "".join(lines))
        with files.atomic_file(model, "wb") as file:
            file.write(self.model)
        return [str(model), str(vocab)]


def from_file(path: Path) -> SentencePieceTokenizer:
    """Load a `.model` file. The config next to it, if there is one, decides whether a BOS token is added."""
    config = read_config(path.with_name("tokenizer_config.json"))
    begins = config.get("add_bos_token", config.get("tokenizer_class") in BEGINNING_CLASSES)
    return SentencePieceTokenizer(path.read_bytes(), str(path), begins=bool(begins))


def _characters_before(text: str) -> list[int]:
    """For each byte of a text in UTF-8, and its end, the number of characters that start before it."""
    starts = (byte & 0xC0 != 0x80 for byte in text.encode())
    return [0, *accumulate(starts)]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer message, by number; nested messages and strings are bytes."""
    for number, wire, start, end in _ranges(message):
        if wire == 0:
            yield number, _varint(message, start)[0]
        elif wire == 2:
            yield number, message[start:end]
        else:
            yield number, struct.unpack_from("<d" if wire == 1 else "<f", message, start)[0]


def _ranges(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The number, wire type and range of bytes of each field."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        number, wire = key >> 3, key & 7
        if wire == 0:
            end = _varint(message, offset)[1]
        elif wire == 2:
            length, offset = _varint(message, offset)
            end = offset + length
        elif wire in (1, 5):
            end = offset + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        yield number, wire, offset, end
        offset = end


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset


def _with_length(value: bytes) -> bytes:
    """Field 1 with a string or a nested message."""
    length, number = b"", len(value)
    while number >= 0x80:
        length, number = length + bytes([number & 0x7F | 0x80]), number >> 7
    return b"\x0a" + length + bytes([number]) + value
