"""Reading torch's .pt and .bin files without trusting them.

torch's own reader for weights runs nothing that a file names, and refuses what it does not know. Checkpoints of
Megatron and DeepSpeed also name classes of theirs, for settings that nobody needs here: those become inert stand-ins,
which keep what they are given and do nothing. Any other name is refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.core.errors import CorruptFileError, UserError

# Classes of settings and of random states, by the beginning of their full names.
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


class _StandIn:
    """Takes the place of a class that is not needed: any arguments, any state, no deeds."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


def load(path: Path) -> Any:
    """What a file holds, its tensors still on disk where its form allows that."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        allowed: list[Any] = [(_known(name, path), name) for name in names]
        with torch.serialization.safe_globals(allowed):
            is_zip = path.open("rb").read(2) == b"PK"
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except Exception as error:  # A hostile or damaged file can make the reader fail in any way; none of them is a bug.
        raise CorruptFileError(f"cannot be read: {_reason(error)}", where=str(path)) from None


def _reason(error: Exception) -> str:
    """What is wrong with a file; of how torch's reader of archives stumbled over it nobody is the wiser."""
    reported = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    of_the_archive = ("PytorchStreamReader", "miniz", "central directory", "not enough data", "storage")
    if isinstance(error, EOFError) or any(words in str(error) for words in of_the_archive):
        return "it is cut short or damaged"
    return reported


def _known(name: str, path: Path) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    if name.startswith(INERT) or name in INERT_NAMES:
        # A class of its own for each, since torch keeps them apart by identity.
        return type("StandIn", (_StandIn,), {})
    raise UserError(
        f"it names {name}, which has no place in a checkpoint",
        where=str(path),
        hint="nothing of it was run; if you trust the file, save its weights as safetensors",
    )


def tensors_in(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of nested tables, by their names joined with dots."""
    found: dict[str, Tensor] = {}
    for key, inner in value.items() if isinstance(value, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(inner, Tensor):
            found[name] = inner.detach()
        elif isinstance(inner, dict):
            found |= tensors_in(inner, f"{name}.")
    return found


def settings_of(value: Any) -> dict[str, Any]:
    """A saved Namespace as a table."""
    if isinstance(value, argparse.Namespace):
        return dict(vars(value))
    return dict(value) if isinstance(value, dict) else {}
