"""`SHA256SUMS` of a model folder: one line `<SHA-256>  <path>` per file, in the format of coreutils' `sha256sum`.

    cd FOLDER && sha256sum -c SHA256SUMS

Paths are relative to the folder. Every command that writes a model folder writes this file into it; loading a model
does not read it, since hashing all weights would cost more than loading them. `steelyard checkpoint verify` does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import CorruptFileError

NAME = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *]([^\\\r\n]+)")
MOST_BYTES = 16 << 20
THREADS = 4  # hashlib releases the GIL.


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file, by name."""
    return dict(_for_each(folder, list(names), digest))


def _for_each(folder: Path, names: list[str], function: Callable[[Path], str]) -> Iterator[tuple[str, str]]:
    """Apply a function that reads whole files to each of them, in several threads."""
    sizes = [(folder / name).stat().st_size for name in names]
    with console.progress("sha256", sum(sizes), "bytes") as progress, ThreadPoolExecutor(THREADS) as pool:
        for name, size, result in zip(names, sizes, pool.map(lambda name: function(folder / name), names), strict=True):
            progress.advance(size)
            yield name, result


def files_in(folder: Path) -> list[str]:
    """All files in a folder and its subfolders that its SHA256SUMS must list."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(files.TEMPORARY))
    return sorted(str(PurePosixPath(path.relative_to(folder))) for path in paths if path != folder / NAME)


def text_of(sums: Mapping[str, str]) -> str:
    """The content of a SHA256SUMS file."""
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def write(folder: Path) -> None:
    """Write the SHA256SUMS of all files of a folder into it."""
    files.write_text(folder / NAME, text_of(digests(folder, files_in(folder))))


def read(folder: Path) -> dict[str, str] | None:
    """The SHA-256 of each file that a folder's SHA256SUMS lists, by name, or None if it has no such file."""
    path = folder / NAME
    if not path.is_file():
        return None
    if path.stat().st_size > MOST_BYTES:
        raise CorruptFileError(f"it is larger than {MOST_BYTES >> 20} MiB", where=str(path))
    sums: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        match = LINE.fullmatch(line)
        if match is None or PurePosixPath(match[2]).is_absolute() or ".." in PurePosixPath(match[2]).parts:
            raise CorruptFileError(
                f"line {number} is not a SHA-256 and the name of a file in this folder", where=str(path)
            )
        sums[str(PurePosixPath(match[2]))] = match[1]
    return sums


def mismatches(folder: Path, sums: Mapping[str, str], source: str = NAME) -> list[str]:
    """Problems of the files that `source` lists, one sentence each."""
    present = [name for name in sums if (folder / name).is_file()]
    problems = [f"{folder / name} is missing, and {source} lists it" for name in sums if name not in present]
    for name, result in _for_each(folder, present, _digest_or_reason):
        if result != sums[name]:
            reason = f"does not match its SHA-256 in {source}" if len(result) == 64 else result
            problems.append(f"{folder / name} {reason}")
    return problems


def _digest_or_reason(path: Path) -> str:
    try:
        return digest(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
