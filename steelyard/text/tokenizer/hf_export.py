"""Export a tokenizer to a Hugging Face folder, and count the texts whose ids change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Difference:
    """A text whose ids differ."""

    text: str
    before: list[int]
    after: list[int]


def export_hf(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder, which must be empty or not exist."""
    refuse_folder(folder)
    tokenizer.save(folder)


def refuse_folder(folder: Path) -> None:
    """Raise if the folder has files."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", hint="choose a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", hint="choose a new folder")


def differences(tokenizer: Tokenizer, folder: Path, texts: Iterable[str]) -> tuple[int, list[Difference]]:
    """The number of texts, and those whose ids differ between the tokenizer and the folder loaded by `transformers`."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError("the comparison needs transformers", hint="pip install transformers") from None
    exported: Any = AutoTokenizer.from_pretrained(str(folder))
    count, changed = 0, []
    for text in texts:
        count += 1
        before, after = tokenizer.encode(text), exported(text, add_special_tokens=False)["input_ids"]
        if before != after:
            changed.append(Difference(text, before, after))
    return count, changed
