"""`steelyard doctor explain`: a log of any size, read once in blocks, its known errors answered.

Logs repeat themselves: most lines differ in their digits alone. Lines are therefore compared without digits to those
that were found to say nothing, whole blocks at a time, and only what is new is looked at. What is kept does not grow
with the log: one entry per known error, the first unknown ones, and a bounded set of lines that say nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from steelyard.core import secrets
from steelyard.core.errors import UserError
from steelyard.doctor.known_errors import OVER, Explained, explain_line

BLOCK = 1 << 20
WINDOW, OVERLAP = 4096, 512  # A longer line is looked at piece by piece.
SHOWN = 300
UNKNOWN_KEPT = 10
MET_KEPT = 200  # Answers name what the line names, so one error may have many.
DULL_KEPT, DULL_LENGTH = 20_000, 500
DIGITS = b"0123456789"
IS_ERROR = re.compile(
    r"\b(\w*(Error|Exception)|error|fatal): |\b(ERROR|FATAL)\b|Segmentation fault|\bAborted\b"
    r"|: (command not found|No such file or directory|Permission denied)\s*$"
)
ERRORS = (
    "Error: ",
    "Exception: ",
    "error: ",
    "fatal: ",
    "ERROR",
    "FATAL",
    "Segmentation fault",
    "Aborted",
    "command not found",
    "No such file or directory",
    "Permission denied",
)


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
    dull: set[bytes] = field(default_factory=set)
    """Lines without their digits that say nothing."""


def explain(paths: Sequence[str]) -> Told:
    """Read logs, or a run's; `-` is standard input."""
    reported = Told()
    for path in paths:
        for file in _logs(path):
            with _opened(file) as stream:
                _read(stream, file, reported)
    return reported


def _logs(path: str) -> list[str]:
    if path == "-":
        return ["-"]
    place = Path(path)
    if place.is_dir():
        found = sorted(
            str(file)
            for file in (place / "logs").glob("*")
            if file.suffix in (".err", ".out", ".log", ".txt") and file.is_file()
        )
        if not found:
            raise UserError(f"{path} is a folder without logs", hint="name a log file, or a run folder")
        return found
    if not place.exists():
        raise UserError(f"there is no log {path}", hint="name a log file, a run folder, or - for standard input")
    return [path]


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        yield file


def _read(stream: IO[bytes], name: str, reported: Told) -> None:
    """Block by block, cut at line ends; a line longer than a block is cut anywhere."""
    rest, line = b"", 1
    while block := stream.read(BLOCK):
        reported.bytes_read += len(block)
        block = rest + block
        end = block.rfind(b"\n") + 1
        if not end and len(block) < 2 * BLOCK:
            rest = block
            continue
        end = end or len(block)
        rest, block = block[end:], block[:end]
        _look(block, name, line, reported)
        line += block.count(b"\n")
    _look(rest, name, line, reported)


def _look(block: bytes, name: str, first: int, reported: Told) -> None:
    """The lines of a block that are not known to say nothing, in order."""
    bare = block.translate(None, DIGITS).split(b"\n")
    new = set(bare) - reported.dull
    if not new:
        return
    if len(reported.dull) > DULL_KEPT:
        reported.dull.clear()
    for index, (line, without) in enumerate(zip(block.split(b"\n"), bare, strict=True)):
        if without in new and not _says_something(line, name, first + index, reported):
            new.discard(without)
            if len(without) < DULL_LENGTH:
                reported.dull.add(without)


def _says_something(line: bytes, name: str, number: int, reported: Told) -> bool:
    """Note what a line says; a very long one says the first thing that is found in it."""
    for start in range(0, max(len(line), 1), WINDOW - OVERLAP):
        if _meet(line[start : start + WINDOW].decode("utf-8", "replace"), name, number, reported):
            return True
    return False


def _meet(text: str, name: str, number: int, reported: Told) -> bool:
    is_end = _take_back(text, _printable(name), reported)
    explained = explain_line(text)
    if explained is None and not (any(sign in text for sign in ERRORS) and IS_ERROR.search(text)):
        return is_end
    if explained is not None:
        key = f"{explained.name} {explained.meaning}"
        if key not in reported.met and len(reported.met) >= MET_KEPT:
            key = next((key for key, met in reported.met.items() if met.explained.name == explained.name), key)
        if key not in reported.met:
            words = replace(explained, meaning=_printable(explained.meaning), hint=_printable(explained.hint))
            reported.met[key] = Met(words, _printable(name), number, _shown(text))
        reported.met[key].count += 1
        return True
    reported.unknown_count += 1
    if len(reported.unknown) < UNKNOWN_KEPT:
        reported.unknown.append({"file": _printable(name), "line": number, "text": _shown(text)})
    return True


def _take_back(text: str, file: str, reported: Told) -> bool:
    """Forget messages of this file that announced what this line says has ended; whether it says such a thing."""
    ended = {name for name, piece in OVER if piece in text}
    if ended:
        reported.met = {
            key: met for key, met in reported.met.items() if met.explained.name not in ended or met.file != file
        }
    return bool(ended)


def _shown(text: str) -> str:
    """A line as it may be printed, and short."""
    return _printable(text)[:SHOWN]


def _printable(text: str) -> str:
    """Without secrets, and without what would steer a terminal."""
    return secrets.scrub("".join(letter if letter.isprintable() else " " for letter in text).strip())


def as_result(reported: Told) -> dict[str, Any]:
    """For `--json`."""
    return {
        "known": [
            {
                "name": met.explained.name, "file": met.file, "line": met.line, "text": met.text, "count": met.count,
                "meaning": met.explained.meaning, "hint": met.explained.hint, "harmless": met.explained.harmless,
            }
            for met in _ordered(reported)
        ],
        "unknown": reported.unknown,
        "unknown_count": reported.unknown_count,
        "bytes_read": reported.bytes_read,
    }  # fmt: skip


def _ordered(reported: Told) -> list[Met]:
    return sorted(reported.met.values(), key=lambda met: met.explained.harmless)


def as_text(reported: Told) -> str:
    """For a person: real errors, then unknown ones, then what may be ignored."""
    met = _ordered(reported)
    lines = [line for one in met if not one.explained.harmless for line in _in_lines(one)]
    if reported.unknown:
        lines.append(f"not known: {reported.unknown_count}, of which the first:")
        lines += [f"  {one['file']}:{one['line']}  {one['text']}" for one in reported.unknown] + [""]
    lines += [line for one in met if one.explained.harmless for line in _in_lines(one)]
    return "\n".join(lines).rstrip() or "nothing that looks like an error"


def _in_lines(met: Met) -> list[str]:
    times = f", {met.count} times" if met.count > 1 else ""
    return [
        f"{'harmless' if met.explained.harmless else 'error'}  {met.file}:{met.line}{times}",
        f"  {met.text}",
        f"  {met.explained.meaning}",
        f"  what to do: {met.explained.hint}",
        "",
    ]
