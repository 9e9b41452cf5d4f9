"""`steelyard doctor explain`: a log of any size, read once in blocks, its known errors answered.

A block is first searched for the plain hints of `known.KNOWN`, which costs a few passes of memory speed; lines are only
cut out around hits. What is kept does not grow with the log: one entry per known error, and the first unknown ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from steelyard.core import secrets
from steelyard.core.errors import UserError
from steelyard.doctor.known import KNOWN, Explained, explain_line

BLOCK = 4 << 20
LINE = 4096  # Of a longer line only so much around the hit is looked at.
SHOWN = 300
UNKNOWN_KEPT = 10
ERRORS = (b"Error: ", b"error: ", b"ERROR", b"FATAL", b"fatal: ", b"Segmentation fault", b"Exception: ", b"Aborted")
HINTS = tuple(dict.fromkeys(known.hint.encode() for known in KNOWN))
IS_ERROR = re.compile(r"\b(\w*(Error|Exception)|error|fatal): |\b(ERROR|FATAL)\b|Segmentation fault|\bAborted\b")


@dataclass
class Met:
    """A known error in the log: where it was first, and how often it came."""

    explained: Explained
    file: str
    line: int
    text: str
    count: int = 0


@dataclass
class Told:
    """What a log says."""

    met: dict[str, Met] = field(default_factory=dict)
    unknown: list[dict[str, Any]] = field(default_factory=list)
    unknown_count: int = 0
    bytes_read: int = 0


def explain(paths: Sequence[str]) -> Told:
    """Read logs, or a run's; `-` is standard input."""
    told = Told()
    for path in paths:
        for file in _logs(path):
            with _opened(file) as stream:
                _read(stream, file, told)
    return told


def _logs(path: str) -> list[str]:
    if path == "-":
        return ["-"]
    place = Path(path)
    if place.is_dir():
        found = sorted(
            str(file) for file in (place / "logs").glob("*") if file.suffix in (".err", ".out", ".log", ".txt")
        )
        if not found:
            raise UserError(f"{path} is a folder without logs", mend="name a log file, or a run folder")
        return found
    if not place.exists():
        raise UserError(f"there is no log {path}", mend="name a log file, a run folder, or - for standard input")
    return [path]


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        yield file


def _read(stream: IO[bytes], name: str, told: Told) -> None:
    """Block by block, cut at line ends; a line longer than a block is cut anywhere."""
    rest, line = b"", 1
    while block := stream.read(BLOCK):
        told.bytes_read += len(block)
        block = rest + block
        end = block.rfind(b"\n") + 1
        if not end and len(block) < 2 * BLOCK:
            rest = block
            continue
        end = end or len(block)
        rest, block = block[end:], block[:end]
        _look(block, name, line, told)
        line += block.count(b"\n")
    _look(rest, name, line, told)


def _look(block: bytes, name: str, first: int, told: Told) -> None:
    """All lines of a block that hold a hint, each once, in order."""
    starts: dict[int, int] = {}
    for hint in (*HINTS, *ERRORS):
        at = block.find(hint)
        while at >= 0:
            start = max(block.rfind(b"\n", 0, at) + 1, at - LINE)
            starts.setdefault(start, at)
            end = block.find(b"\n", at)
            at = -1 if end < 0 else block.find(hint, end)
    number, counted = first, 0
    for start in sorted(starts):
        number += block.count(b"\n", counted, start)
        counted = start
        end = block.find(b"\n", starts[start])
        end = len(block) if end < 0 else end
        _meet(block[start : min(end, starts[start] + LINE)].decode("utf-8", "replace"), name, number, told)


def _meet(text: str, name: str, number: int, told: Told) -> None:
    explained = explain_line(text)
    shown = secrets.scrub("".join(letter if letter.isprintable() else " " for letter in text).strip())[:SHOWN]
    if explained is not None:
        met = told.met.setdefault(f"{explained.name} {explained.meaning}", Met(explained, name, number, shown))
        met.count += 1
    elif IS_ERROR.search(text):
        told.unknown_count += 1
        if len(told.unknown) < UNKNOWN_KEPT:
            told.unknown.append({"file": name, "line": number, "text": shown})


def as_result(told: Told) -> dict[str, Any]:
    """For `--json`."""
    return {
        "known": [
            {
                "name": met.explained.name, "file": met.file, "line": met.line, "text": met.text, "count": met.count,
                "meaning": met.explained.meaning, "mend": met.explained.mend, "harmless": met.explained.harmless,
            }
            for met in _ordered(told)
        ],
        "unknown": told.unknown,
        "unknown_count": told.unknown_count,
        "bytes_read": told.bytes_read,
    }  # fmt: skip


def _ordered(told: Told) -> list[Met]:
    return sorted(told.met.values(), key=lambda met: met.explained.harmless)


def as_text(told: Told) -> str:
    """For a person: real errors, then unknown ones, then what may be ignored."""
    lines: list[str] = []
    for met in _ordered(told):
        times = f", {met.count} times" if met.count > 1 else ""
        lines += [
            f"{'harmless' if met.explained.harmless else 'error'}  {met.file}:{met.line}{times}",
            f"  {met.text}",
            f"  {met.explained.meaning}",
            f"  what to do: {met.explained.mend}",
            "",
        ]
    if told.unknown:
        lines.append(f"not known, {told.unknown_count} lines; the first:")
        lines += [f"  {one['file']}:{one['line']}  {one['text']}" for one in told.unknown]
    return "\n".join(lines).rstrip() or "nothing that looks like an error"
