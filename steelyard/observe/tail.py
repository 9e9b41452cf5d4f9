"""Follows growing files by offset: the cost of a read depends on the new data, not on the file size.

The first read of a file starts near its end. Later reads start where the last one ended. If more was added than one
read allows, the middle is skipped and recorded as a gap, which can be read later. A replaced or truncated file counts
as new.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.core.safe_parse import loads

LONGEST_TORN = 1 << 20  # limits the memory that an endless line takes
MOST_GAPS = 256


class Tail:
    """The end of one growing file."""

    def __init__(self, path: Path, first: int, most: int) -> None:
        self.path, self.first, self.most = path, first, most
        self.offset = 0
        self.begins = 0
        """File offset of the chunk that was read last."""
        self.gaps: list[tuple[int, int]] = []
        """Skipped parts, in order: start and end offsets."""
        self.changed: float | None = None
        """mtime of the file, by its filesystem's clock."""
        self._inode = -1
        self._torn = b""

    def lines(self) -> tuple[list[bytes], bool]:
        """The new complete lines, and whether the file is new, so that earlier lines no longer count."""
        chunk, is_new = self.chunk()
        return chunk.split(b"\n")[:-1], is_new

    def chunk(self) -> tuple[bytes, bool]:
        """The same as one chunk that ends with a newline, or empty."""
        try:
            status = self.path.stat()
        except OSError:
            return b"", False
        is_new = status.st_ino != self._inode or status.st_size < self.offset
        if is_new:
            self._inode, self.offset, self._torn = status.st_ino, 0, b""
            self.gaps.clear()
        self.changed = status.st_mtime
        most = self.first if is_new else self.most
        grown = status.st_size - self.offset
        if grown <= 0:
            return b"", is_new
        known = self.offset - len(self._torn)
        if grown > most:
            self.offset = status.st_size - most
            self._torn = b""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(min(grown, most))
        except OSError:
            return b"", is_new
        self.offset += len(data)
        if grown > most:  # The first line is incomplete.
            data = data.partition(b"\n")[2]
        data = self._torn + data
        self.begins = self.offset - len(data)
        if self.begins > known and len(self.gaps) < MOST_GAPS:
            self.gaps.append((known, self.begins))
        end = data.rfind(b"\n") + 1
        self._torn = data[end:][-LONGEST_TORN:]
        return data[:end], is_new

    def fill(self, since: int, most: int) -> tuple[bytes, int]:
        """At most `most` bytes of the first gap from offset `since` on, in complete lines, and their offset."""
        self.gaps = [(max(begin, since), end) for begin, end in self.gaps if end > since]
        if not self.gaps:
            return b"", 0
        begin, end = self.gaps[0]
        try:
            with open(self.path, "rb") as file:
                file.seek(begin)
                data = file.read(min(most, end - begin))
        except OSError:
            data = b""
        if begin + len(data) < end:  # A line longer than one read is split.
            data = data[: data.rfind(b"\n") + 1] or data
        self.gaps[0] = begin + len(data), end
        if begin + len(data) >= end or not data:
            self.gaps.pop(0)
        return data, begin


class CachedJson:
    """A small JSON file, read again only after it changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: dict[str, Any] = {}
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> dict[str, Any]:
        """The current object; empty if the file is missing, the last valid one if it is incomplete."""
        try:
            status = self.path.stat()
            seen = status.st_ino, status.st_mtime_ns, status.st_size
            if seen != self._seen:
                value = loads(self.path.read_bytes())
                self.value, self._seen = value if isinstance(value, dict) else {}, seen
        except FileNotFoundError:
            self.value, self._seen = {}, None
        except (OSError, ValueError, RecursionError):
            self._seen = None
        return self.value
