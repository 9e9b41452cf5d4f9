"""Safely read torch's .pt and .bin files.

torch.load with `weights_only` calls nothing that a file refers to, and rejects unknown classes. Checkpoints of Megatron
and DeepSpeed also refer to their own classes, for settings that are not needed here. These are replaced by placeholder
classes, which store their arguments and do nothing. Any other class is rejected.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.core.errors import CorruptFileError, UserError

# Prefixes of classes of settings and of random states.
INERT = (
    "megatron.",
    "deepspeed.",
    "transformer_engine.",
    "numpy.",
    "_codecs.encode",
    "torch.device",
    "types.",
    "enum.",
)
INERT_NAMES = (
    "_io.BytesIO", "builtins.getattr", "builtins.set", "builtins.complex", "collections.deque", "signal.Signals",
)  # fmt: skip


class _Placeholder:
    """A placeholder for a class that is not needed: takes any arguments and state, and does nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


def load(path: Path) -> Any:
    """Load a file, with its tensors memory-mapped if the format allows it."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        allowed: list[Any] = [(_known(name, path), name) for name in names]
        with torch.serialization.safe_globals(allowed):
            is_zip = path.open("rb").read(2) == b"PK"
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except Exception as error:  # A malicious or corrupt file can raise anything.
        raise CorruptFileError(f"cannot be read: {_reason(error)}", where=str(path)) from None


def _reason(error: Exception) -> str:
    """The reason why a file cannot be read; errors of torch's archive reader are summarized."""
    message = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    archive_errors = ("PytorchStreamReader", "miniz", "central directory", "not enough data", "storage")
    if isinstance(error, EOFError) or any(words in str(error) for words in archive_errors):
        return "it is truncated or damaged"
    return message


def _known(name: str, path: Path) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    if name.startswith(INERT) or name in INERT_NAMES:
        # A separate class for each name, because torch distinguishes them by identity.
        return type("Placeholder", (_Placeholder,), {})
    raise UserError(
        f"it refers to {name}, which is not allowed in a checkpoint",
        where=str(path),
        hint="none of its code was run; if you trust the file, save its weights as safetensors",
    )


def tensors_in(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors in nested dicts, by their keys joined with dots."""
    tensors: dict[str, Tensor] = {}
    for key, inner in value.items() if isinstance(value, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(inner, Tensor):
            tensors[name] = inner.detach()
        elif isinstance(inner, dict):
            tensors |= tensors_in(inner, f"{name}.")
    return tensors


def settings_of(value: Any) -> dict[str, Any]:
    """A saved Namespace as a dict."""
    if isinstance(value, argparse.Namespace):
        return dict(vars(value))
    return dict(value) if isinstance(value, dict) else {}
