"""Reads the dynamic section of a shared library: its soname, the sonames it needs, and its search path.

It parses the file (64-bit, little-endian ELF), since loading a library of a gigabyte is slow, and a library that cannot
be loaded must be read too. Layout: System V ABI, "Object Files" and "Dynamic Linking".
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

LOAD, DYNAMIC = 1, 2  # segment types
NEEDED, STRINGS, SONAME, RPATH, RUNPATH = 1, 5, 14, 15, 29  # tags of dynamic entries
MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 243: "riscv64"}


@dataclass(frozen=True)
class Library:
    """The dynamic section of a shared library."""

    path: Path
    soname: str | None
    needed: tuple[str, ...]
    search: tuple[Path, ...]
    """Its RPATH or RUNPATH, with $ORIGIN expanded."""
    architecture: str


def read(path: Path) -> Library | None:
    """The library at a path; None if it is not a valid 64-bit ELF library."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _library(path, data)
    except (OSError, ValueError, struct.error, IndexError, StopIteration):
        return None


def _library(path: Path, data: mmap.mmap) -> Library | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    machine = struct.unpack_from("<H", data, 18)[0]
    (at,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic = None
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, at + index * size)
        if kind == LOAD:
            loads.append((address, offset, length))
        elif kind == DYNAMIC:
            dynamic = (offset, length)
    if dynamic is None:
        return None
    entries = [struct.unpack_from("<qQ", data, dynamic[0] + place) for place in range(0, dynamic[1] - 15, 16)]
    table = next(value for tag, value in entries if tag == STRINGS)
    strings = next(offset + table - address for address, offset, length in loads if 0 <= table - address < length)

    def words(*wanted: int) -> list[str]:
        starts = [strings + value for tag, value in entries if tag in wanted]
        return [data[start : data.find(b"\0", start)].decode("utf-8", "replace") for start in starts]

    search = [folder for entry in words(RPATH, RUNPATH) for folder in entry.split(":") if folder]
    return Library(
        path=path,
        soname=next(iter(words(SONAME)), None),
        needed=tuple(words(NEEDED)),
        search=tuple(_place(folder, str(path.parent)) for folder in search),
        architecture=MACHINES.get(machine, f"machine {machine}"),
    )


def _place(folder: str, origin: str) -> Path:
    """A folder of the search path, normalized, with $ORIGIN expanded."""
    return Path(os.path.normpath(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)))
