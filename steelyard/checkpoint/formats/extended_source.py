"""A checkpoint with rows for the new pieces of an extended tokenizer.

A new row of the embedding, and of a head that is not tied, is the mean of the rows of the pieces into which the
checkpoint's own tokenizer splits the new piece. So a new token starts with the meaning of what it replaces. A piece of
unknown text only gets the mean of all rows. All other rows keep their bits.

New ids follow the largest id of the tokenizer. A model may have more rows than its tokenizer has ids; new pieces use
these rows first, and the vocabulary grows only by what is missing.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from steelyard.checkpoint.formats.huggingface import tokenizer_files
from steelyard.checkpoint.formats.source import TABLES, CheckpointSource, SourceView, padded
from steelyard.core.errors import UserError
from steelyard.text.tokenizer import load_tokenizer
from steelyard.text.tokenizer.extend_vocabulary import parts_of_new_pieces


class ExtendedSource(SourceView):
    """A source with the vocabulary of another tokenizer."""

    def __init__(self, origin: CheckpointSource, tokenizer: str) -> None:
        if origin.tokenizer is None:
            raise UserError(
                f"{origin.path} has no tokenizer to compare with",
                hint="steelyard checkpoint convert SRC OUT --to hf --tokenizer BASE adds one",
            )
        extended = load_tokenizer(tokenizer)
        self.parts = parts_of_new_pieces(origin.load_tokenizer(), extended)
        """The ids of which each new row is the mean."""
        if not self.parts:
            raise UserError(f"the tokenizer {tokenizer} has no new pieces", where=str(origin.path))
        super().__init__(origin)
        self.remark = origin.remark
        self.config = origin.config.model_copy(update={"vocab": max(origin.config.vocab, extended.vocab_size)})
        self.tokenizer = tokenizer
        self.tokenizer_files = tokenizer_files(Path(tokenizer)) if Path(tokenizer).is_dir() else []

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Those of the origin, with more rows of embedding and head."""
        sizes = super().sizes()
        tables = {name: (self.config.padded_vocab, *sizes[name][1:]) for name in TABLES if name in sizes}
        return sizes | tables

    def tensor(self, name: str) -> Tensor:
        """A tensor of the origin; embedding and head with the new rows."""
        whole = super().tensor(name)
        if name not in TABLES:
            return whole
        old = whole[: self.origin.config.vocab]
        table = padded(old, self.config).clone()
        for number, parts in self.parts.items():
            rows = [part for part in parts if part < len(old)]
            table[number] = (old[rows] if rows else old).float().mean(0)
        return table
