"""`<prefix>.sums`, next to a pair of token files: the checksums that `data tokenize` and `data merge` write.

    {"format": 1,
     "idx": {"bytes": N, "crc32": X},
     "bin": {"bytes": N, "block_bytes": B, "crc32": [X, ...]},
     "checksum": SHA-256 of the rest, as compact JSON with sorted keys}

CRC-32 detects every flipped bit and every error burst of up to 32 bits. It does not protect against intentional
changes. Pairs that other programs wrote have no such file; only their index is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import CorruptFileError, UserError

FORMAT = 1
SMALLEST_BLOCK = 1 << 20  # bytes
MOST_BLOCKS = 1 << 16
BLOCKS_AT_OPENING = 8
READ_BYTES = 1 << 24


def path_of(prefix: str | Path) -> Path:
    """The path of the checksum file."""
    return Path(f"{prefix}.sums")


def write(prefix: str | Path, index: Path | None = None) -> None:
    """Write the checksums of a pair; `index` is its .idx while that has another name."""
    index, tokens = index or Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    size = tokens.stat().st_size
    block = SMALLEST_BLOCK
    while size > block * MOST_BLOCKS:
        block *= 2
    blocks = []
    with console.progress("checksums", -(-size // block), "blocks") as progress:
        for _, crc in _blocks(tokens, block, range(-(-size // block))):
            blocks.append(crc)
            progress.advance(1)
    content: dict[str, Any] = {
        "format": FORMAT,
        "idx": {"bytes": index.stat().st_size, "crc32": _crc(index)},
        "bin": {"bytes": size, "block_bytes": block, "crc32": blocks},
    }
    text = json.dumps({**content, "checksum": _own(content)}, separators=(",", ":"))
    files.write_text(path_of(prefix), text + "\n")


def check(prefix: str | Path, everything: bool = False) -> bool:
    """Compare the index, and all blocks of the tokens or a fixed sample of them, with the checksums of the pair.

    Return False if the pair has no checksums. Raise CorruptFileError if it does not match them.
    """
    path = path_of(prefix)
    if not path.is_file():
        return False
    content = _read(path)
    index, tokens, recorded = Path(f"{prefix}.idx"), Path(f"{prefix}.bin"), content["bin"]
    if index.stat().st_size != content["idx"]["bytes"] or _crc(index) != content["idx"]["crc32"]:
        raise _mismatch(index, path)
    if tokens.stat().st_size != recorded["bytes"]:
        raise _mismatch(tokens, path)
    total, block = len(recorded["crc32"]), recorded["block_bytes"]
    sample = {number * (total - 1) // (BLOCKS_AT_OPENING - 1) for number in range(BLOCKS_AT_OPENING)}
    chosen: Iterable[int] = range(total) if everything else sorted(sample) if total else ()
    with console.progress("checksums", total, "blocks") if everything else contextlib.nullcontext() as progress:
        for number, crc in _blocks(tokens, block, chosen):
            if crc != recorded["crc32"][number]:
                raise _mismatch(tokens, path, f" between bytes {number * block} and {(number + 1) * block}")
            if progress is not None:
                progress.advance(1)
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
        if checksum != _own(content):
            raise CorruptFileError(
                "this checksum file does not match its own checksum", where=str(path), hint=_hint(path)
            )
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CorruptFileError("this is not a checksum file", where=str(path), hint=_hint(path)) from None
    if content["format"] != FORMAT:
        raise UserError(f"checksum format {content['format']} is not supported", where=str(path), hint=_hint(path))
    return content


def _mismatch(file: Path, sums: Path, place: str = "") -> CorruptFileError:
    return CorruptFileError(f"{file} does not match its checksum{place}", hint=_hint(sums))


def _hint(sums: Path) -> str:
    return f"copy or create the pair again; if another program changed it intentionally, delete {sums}"


def _own(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            crc = zlib.crc32(data, crc)
    return crc


def _blocks(path: Path, size: int, numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    with open(path, "rb") as file:
        for number in numbers:
            file.seek(number * size)
            yield number, zlib.crc32(file.read(size))
