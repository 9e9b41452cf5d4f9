"""Atomic writes of files and folders.

Everything is written under a temporary name in the destination's folder, flushed to disk, and renamed. A killed
command leaves the old file, the new file, or a leftover whose name starts with `.tmp-`, which readers ignore. The next
writer of a folder of the same name removes the leftovers of killed processes and prints a message.
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
    """The path after the rename, for messages."""
    return TEMPORARY_NAME.sub("", str(path))


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w", durable: bool = True, private: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file that is renamed to `path` when the block ends without an error.

    With `durable=False`, for files that can be recomputed, there is no fsync: the file survives a killed process, but
    perhaps not a power failure. A `private` file holds a secret: only its owner can open it, from its creation on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        if private:
            temporary.unlink(missing_ok=True)
        opener = _open_private if private else None
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


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` when the block ends without an error. `path` must not exist."""
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
    """A folder next to `path` that exists during the block. Removes leftovers of killed writers of `path` first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    temporary = temporary_beside(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, wait: bool = False, tries: int = 3) -> Iterator[IO[str]]:
    """Hold a lock file during the block; the kernel releases it when the process dies.

    With `wait`, blocks until it is free. Otherwise raises `BlockingIOError` after a few tries, since a reader that
    tests the lock holds it for a moment.
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
    """Return the path of a file in an untrusted folder; raise if it is a link that leaves the folder.

    Its content is copied or published with the folder, and the link may point to a private key. In the cache of the
    hub (`models--user--name/snapshots/COMMIT/`) files are links into `blobs`, which belongs to the same repository.
    """
    folder, real = path.parent.resolve(), path.resolve()
    cache = next((each.parent for each in folder.parents if each.name == "snapshots"), None)
    blobs = [cache / "blobs"] if cache is not None and cache.name.startswith(("models--", "datasets--")) else []
    if any(real.is_relative_to(allowed) for allowed in [folder, *blobs]):
        return path
    raise UserError(
        f"{path} is a link that leaves its folder", hint="copy the file into the folder if it belongs there"
    )


def sweep_leftovers(folder: Path) -> None:
    """Remove leftovers of killed writers. Only for a folder that no other process writes to."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove leftovers of this path whose process is dead, with a message, since they may be large."""
    name = re.compile(rf"{re.escape(TEMPORARY)}(\d+)-{re.escape(path.name)}")
    for leftover in path.parent.iterdir():
        match = name.fullmatch(leftover.name)
        if match and leftover.is_dir() and not _is_alive(int(match[1])):
            console.say(f"removing {leftover}, left by a killed command")
            shutil.rmtree(leftover, ignore_errors=True)


def _is_alive(process: int) -> bool:
    """Whether a process with this id runs on this host, of any user."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def free_space(path: Path) -> int:
    """Free bytes on the file system of a path, which need not exist yet."""
    resolved = path.expanduser().resolve()
    return shutil.disk_usage(next(folder for folder in (resolved, *resolved.parents) if folder.exists())).free


def sync_file(path: Path) -> None:
    """Flush a file to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk, if the file system can: Windows drives under WSL may not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
