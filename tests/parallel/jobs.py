"""What the ranks of the pool can be asked to do. Imported once, before they are forked."""

import os
import time
from pathlib import Path

from steelyard import train
from steelyard.core.console import console
from steelyard.core.recipe import load
from steelyard.train.extension import Extension


def training(overrides: list[str], run: str, extension: Extension | None = None, resume: str = "auto") -> str:
    """Train the tiny recipe and return what the first rank said."""
    said: list[str] = []
    console.quiet, console._print = False, said.append  # type: ignore[method-assign]
    train.run(load("tiny.toml", overrides), Path(run), extension, resume)
    return "\n".join(said)


def failing(rank: int) -> None:
    """One rank raises, the others wait."""
    if os.environ["RANK"] == str(rank):
        raise ValueError("one rank fails")
    hanging()


def hanging() -> None:
    """A rank that is never done."""
    time.sleep(999)
