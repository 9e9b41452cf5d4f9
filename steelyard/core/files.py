"""Files that appear whole or not at all.

Everything is written under a temporary name beside its destination, flushed to disk, and renamed. A killed command
leaves the old file, the new file, or a leftover whose name starts with `.tmp-`; no reader looks at those. Whoever
writes a folder of the same name again removes what the dead left of it, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from steelyard.core.console import console
from steelyard.core.errors import UserError

TEMPORARY = ".tmp-"
TEMPORARY_NAME = re.compile(rf"{re.escape(TEMPORARY)}\d+-")


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that readers ignore and that no other process on this host uses."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


def final(path: str | Path) -> str:
    """A path as it will be called in the end, for people to read."""
    return TEMPORARY_NAME.sub("", str(path))


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w", durable: bool = True, private: bool = False) -> Iterator[IO[Any]]:
    """Open a file that takes its name only when the block ends without an error.

    What can be made again at any time need not be `durable`: it then survives a kill, but perhaps not a power cut.
    A `private` file holds a secret: nobody but its owner can open it, from the moment it is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        if private:
            temporary.unlink(missing_ok=True)
        opener = _opened_privately if private else None
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8", opener=opener) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _opened_privately(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that takes its name only when the block ends without an error. The name must be free."""
    with temporary_folder(path) as temporary:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync_file(file)
        sync_folder(temporary)
        os.rename(temporary, path)
        sync_folder(path.parent)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A folder beside a path for as long as the block lasts. What killed writers left of the same name goes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep_the_dead(path)
    temporary = temporary_beside(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
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


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Write a text file atomically."""
    with atomic_file(path, private=private) as file:
        file.write(text)


def write_json(path: Path, value: Any, private: bool = False) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", private)


def inside(path: Path) -> Path:
    """A file of a folder that somebody else made, refused where it is a link out of that folder.

    Its content is copied or published with the folder, and the link may lead to a private key. In a cache of the hub
    (`models--user--name/snapshots/COMMIT/`) files are links into `blobs`, which belongs to the same repository.
    """
    folder, real = path.parent.resolve(), path.resolve()
    cache = next((each.parent for each in folder.parents if each.name == "snapshots"), None)
    blobs = [cache / "blobs"] if cache is not None and cache.name.startswith(("models--", "datasets--")) else []
    if any(real.is_relative_to(allowed) for allowed in [folder, *blobs]):
        return path
    raise UserError(f"{path} is a link out of its folder", hint="copy the file into the folder if it belongs there")


def sweep_leftovers(folder: Path) -> None:
    """Remove what killed writers left behind. Only for a folder that this process alone is writing to."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _sweep_the_dead(path: Path) -> None:
    """Remove what writers of this path left that are no longer alive, and say so: it may be large."""
    name = re.compile(rf"{re.escape(TEMPORARY)}(\d+)-{re.escape(path.name)}")
    for leftover in path.parent.iterdir():
        match = name.fullmatch(leftover.name)
        if match and leftover.is_dir() and not _is_alive(int(match[1])):
            console.say(f"removing {leftover}, which a killed command left")
            shutil.rmtree(leftover, ignore_errors=True)


def _is_alive(process: int) -> bool:
    """Whether a process of this number runs here; one that is not ours is alive too."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def free_space(path: Path) -> int:
    """Bytes that can be written at a path, which need not be there yet."""
    whole = path.expanduser().resolve()
    return shutil.disk_usage(next(place for place in (whole, *whole.parents) if place.exists())).free


def sync_file(path: Path) -> None:
    """Have the disk hold what was written."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the disk hold the folder's list of names, where the file system can: Windows drives under WSL may not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
