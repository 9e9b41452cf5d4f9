"""Files that appear whole or not at all.

Everything is written under a temporary name beside its destination, flushed to disk, and renamed. A killed command
leaves the old file, the new file, or a leftover whose name starts with `.tmp-`; no reader looks at those, and the
next writer in that folder may sweep them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

TEMPORARY = ".tmp-"


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that readers ignore and that no other process on this host uses."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w", durable: bool = True) -> Iterator[IO[Any]]:
    """Open a file that takes its name only when the block ends without an error.

    What can be made again at any time need not be `durable`: it then survives a kill, but perhaps not a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that takes its name only when the block ends without an error. The name must be free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync_file(file)
        sync_folder(temporary)
        os.rename(temporary, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, wait: bool = False, tries: int = 3) -> Iterator[IO[str]]:
    """Hold a lock file for the length of the block; it is free the moment its holder dies.

    With `wait` until it is free, otherwise `BlockingIOError` after a few tries, which let a reader's glance pass.
    """
    with open(path, "a+", encoding="utf-8") as lock:
        for remaining in reversed(range(1 if wait else tries)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if not remaining:
                    raise
                time.sleep(0.05)
        yield lock


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sweep_leftovers(folder: Path) -> None:
    """Remove what killed writers left behind. Only for a folder that this process alone is writing to."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Have the disk hold what was written."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the disk hold the folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
