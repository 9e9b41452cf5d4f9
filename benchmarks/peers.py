"""Loads the same weights, a Hugging Face folder or a GGUF, with transformers and with steelyard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.formats import open_source
from steelyard.evaluate.load_model import loaded
from steelyard.model import LanguageModel


def both(path: str, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> tuple[LanguageModel, Any]:
    """Our model and transformers', in the same precision, on the same device."""
    import transformers

    found = Path(path)
    options: dict[str, Any] = {"dtype": dtype}
    if found.suffix == ".gguf":
        options["gguf_file"], found = found.name, found.parent
    theirs = transformers.AutoModelForCausalLM.from_pretrained(found, **options).to(device).eval()
    return loaded(open_source(path), device, dtype, compiled=compiled), theirs
