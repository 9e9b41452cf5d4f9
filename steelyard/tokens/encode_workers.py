"""Worker processes that encode chunks: each loads the tokenizer once, ignores Ctrl-C, and exits with its parent."""

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
    """Initialize a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    _loaded["tokenizer"] = tokenizers.load_tokenizer(source)


def tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer of this worker."""
    return _loaded["tokenizer"]


@contextlib.contextmanager
def sole_owner(folder: Path) -> Iterator[None]:
    """Lock the folder of a job; a second process with the same job gets an error."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(folder / "lock"))
        except BlockingIOError:
            raise UserError(f"{folder} is in use by another process", hint="wait for it") from None
        yield
