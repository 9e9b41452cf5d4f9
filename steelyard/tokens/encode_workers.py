"""Processes that encode pieces: each loads the tokenizer once, leaves Ctrl-C to its parent, and dies with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.host import end_with_parent
from steelyard.text import tokenizer as tokenizers

_loaded: dict[str, tokenizers.Tokenizer] = {}


def prepare(source: str, parent: int) -> None:
    """Make a fresh process a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    _loaded["tokenizer"] = tokenizers.load_tokenizer(source)


def tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer of this worker."""
    return _loaded["tokenizer"]


@contextlib.contextmanager
def sole_owner(folder: Path) -> Iterator[None]:
    """Hold a job's folder; a second process at the same job is refused."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(folder / "lock"))
        except BlockingIOError:
            raise UserError(f"{folder} is being worked on by another process", hint="wait for it") from None
        yield
