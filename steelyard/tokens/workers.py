"""Processes that encode pieces: each loads the tokenizer once, leaves Ctrl-C to its parent, and dies with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers

PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_loaded: dict[str, tokenizers.Tokenizer] = {}


def prepare(source: str, parent: int) -> None:
    """Make a fresh process a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the line above.
        os._exit(1)
    _loaded["tokenizer"] = tokenizers.load(source)


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
            raise UserError(f"{folder} is being worked on by another process", mend="wait for it") from None
        yield
