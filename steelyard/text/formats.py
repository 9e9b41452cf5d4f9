"""The formats of corpus files, by file name: txt, jsonl and parquet, each also with .gz or .zst."""

from __future__ import annotations

import contextlib
import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from steelyard.core.errors import UserError

Base = Literal["txt", "jsonl", "parquet"]
Compression = Literal["", "gz", "zst"]
BASES: dict[str, Base] = {".txt": "txt", ".text": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}


@dataclass(frozen=True)
class CorpusFormat:
    """The format and compression of a corpus file."""

    base: Base
    compression: Compression


def format_of(path: Path) -> CorpusFormat:
    """The format of a file, by its name."""
    compression = COMPRESSIONS.get(path.suffix, "")
    name = path.with_suffix("") if compression else path
    if name.suffix not in BASES:
        raise UserError(
            f"{path}: the format is not clear from the file name",
            hint="use .txt, .jsonl or .parquet, also with .gz or .zst",
        )
    return CorpusFormat(BASES[name.suffix], compression)


@contextlib.contextmanager
def reading(path: Path, compression: Compression) -> Iterator[IO[bytes]]:
    """Open a file and decompress it. A truncated file, or one of another format, is an error that names the file."""
    with open_corpus(path) as raw, decompressing(raw, path, compression) as file:
        yield file


def open_corpus(path: Path) -> IO[bytes]:
    """Open a file that must exist."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    return open(path, "rb")


@contextlib.contextmanager
def decompressing(raw: IO[bytes], path: Path, compression: Compression) -> Iterator[IO[bytes]]:
    """Decompress an open file; `raw.tell()` is then how far it has been read."""
    try:
        yield _decompressed(raw, compression)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"the gzip data is truncated or damaged: {error}", where=str(path)) from None
    except _zstd_error() as error:
        raise UserError(f"the zstd data is damaged: {error}", where=str(path)) from None


@contextlib.contextmanager
def writing(file: IO[bytes], compression: Compression) -> Iterator[IO[bytes]]:
    """Compress what is written to an open file."""
    if compression == "gz":
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed:
            yield packed  # type: ignore[misc]
    elif compression == "zst":
        import zstandard

        with zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(file, closefd=False) as packed:
            yield packed
    else:
        yield file


@contextlib.contextmanager
def on_disk(path: Path, compression: Compression) -> Iterator[Path]:
    """The path of the decompressed file: its own, or that of a temporary copy."""
    if not compression:
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".parquet") as copy, reading(path, compression) as unpacked:
        shutil.copyfileobj(unpacked, copy, 1 << 20)
        copy.flush()
        yield Path(copy.name)


def _decompressed(raw: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression == "gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if compression == "zst":
        return io.BufferedReader(_ZstdFile(raw), 1 << 20)
    return raw


class _ZstdFile(io.RawIOBase):
    """A zstd stream of one or more frames that raises an error if the last one is incomplete."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._raw, self._new = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            unused = self._frame.unused_data if self._frame is not None else b""
            packed = unused or self._raw.read(1 << 17)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise _zstd_error()("the stream is truncated")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            self._ready = self._frame.decompress(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _zstd_error() -> type[Exception]:
    import zstandard

    return zstandard.ZstdError
