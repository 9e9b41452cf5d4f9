"""`steelyard doctor explain`: reads a log of any size once, in blocks, and explains its known errors.

Logs are repetitive: most lines differ only in their digits. So lines are compared, without digits and a block at a
time, with lines that contained no error, and only new ones are examined. Memory does not grow with the log: one entry
per known error, the first unknown ones, and a bounded set of lines without errors.
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
from steelyard.core.printable import printable
from steelyard.observe.known_errors import OVER, Explained, explain_line

BLOCK = 1 << 20
WINDOW, OVERLAP = 4096, 512  # A longer line is examined in pieces.
SHOWN = 300
UNKNOWN_KEPT = 10
KNOWN_KEPT = 200  # An explanation contains names from the line, so one error may have many.
DULL_KEPT, DULL_LENGTH = 20_000, 500
DIGITS = b"0123456789"
IS_ERROR = re.compile(
    r"\b(\w*(Error|Exception)|error|fatal): |\b(ERROR|FATAL)\b|Segmentation fault|\bAborted\b"
    r"|: (command not found|No such file or directory|Permission denied)\s*$"
)
# Every match contains one of these, and a search for them is fifteen times faster.
ERRORS = (
    "Error: ", "Exception: ", "error: ", "fatal: ", "ERROR", "FATAL", "Segmentation fault", "Aborted",
    "command not found", "No such file or directory", "Permission denied",
)  # fmt: skip


@dataclass
class ErrorOccurrence:
    """A known error in the log: its first occurrence, and how often it occurs."""

    explained: Explained
    file: str
    line: int
    text: str
    count: int = 0


@dataclass
class LogReport:
    """The errors in a log."""

    known: dict[str, ErrorOccurrence] = field(default_factory=dict)
    unknown: list[dict[str, Any]] = field(default_factory=list)
    unknown_count: int = 0
    bytes_read: int = 0
    dull: set[bytes] = field(default_factory=set)
    """Lines without errors, with their digits removed."""


def explain(paths: Sequence[str]) -> LogReport:
    """Read log files, or those of a run; `-` is standard input."""
    report = LogReport()
    for path in paths:
        for file in _logs(path):
            with _opened(file) as stream:
                _read(stream, file, report)
    return report


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
            raise UserError(f"{path} is a folder without logs", hint="give a log file or a run folder")
        return found
    if not place.exists():
        raise UserError(f"there is no log {path}", hint="give a log file, a run folder, or - for standard input")
    return [path]


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        yield file


def _read(stream: IO[bytes], name: str, report: LogReport) -> None:
    """Read in blocks that end at line ends. A line longer than a block is split anywhere."""
    rest, line = b"", 1
    while block := stream.read(BLOCK):
        report.bytes_read += len(block)
        block = rest + block
        end = block.rfind(b"\n") + 1
        if not end and len(block) < 2 * BLOCK:
            rest = block
            continue
        end = end or len(block)
        rest, block = block[end:], block[:end]
        _examine(block, name, line, report)
        line += block.count(b"\n")
    _examine(rest, name, line, report)


def _examine(block: bytes, name: str, first: int, report: LogReport) -> None:
    """Examine, in order, the lines of a block that are not known to be without errors."""
    bare = block.translate(None, DIGITS).split(b"\n")
    new = set(bare) - report.dull
    if not new:
        return
    if len(report.dull) > DULL_KEPT:
        report.dull.clear()
    for index, (line, without) in enumerate(zip(block.split(b"\n"), bare, strict=True)):
        if without in new and not _has_error(line, name, first + index, report):
            new.discard(without)
            if len(without) < DULL_LENGTH:
                report.dull.add(without)


def _has_error(line: bytes, name: str, number: int, report: LogReport) -> bool:
    """Record the error in a line; for a very long line, the first one."""
    for start in range(0, max(len(line), 1), WINDOW - OVERLAP):
        if _record(line[start : start + WINDOW].decode("utf-8", "replace"), name, number, report):
            return True
    return False


def _record(text: str, name: str, number: int, report: LogReport) -> bool:
    is_end = _drop_ended(text, _printable(name), report)
    explained = explain_line(text)
    if explained is None and not (any(sign in text for sign in ERRORS) and IS_ERROR.search(text)):
        return is_end
    if explained is not None:
        key = f"{explained.name} {explained.meaning}"
        if key not in report.known and len(report.known) >= KNOWN_KEPT:
            key = next((key for key, hit in report.known.items() if hit.explained.name == explained.name), key)
        if key not in report.known:
            words = replace(explained, meaning=_printable(explained.meaning), hint=_printable(explained.hint))
            report.known[key] = ErrorOccurrence(words, _printable(name), number, _shown(text))
        report.known[key].count += 1
        return True
    report.unknown_count += 1
    if len(report.unknown) < UNKNOWN_KEPT:
        report.unknown.append({"file": _printable(name), "line": number, "text": _shown(text)})
    return True


def _drop_ended(text: str, file: str, report: LogReport) -> bool:
    """Drop messages of this file about an operation that this line reports as ended. Returns whether it does."""
    ended = {name for name, piece in OVER if piece in text}
    if ended:
        report.known = {
            key: hit for key, hit in report.known.items() if hit.explained.name not in ended or hit.file != file
        }
    return bool(ended)


def _shown(text: str) -> str:
    """A line, printable and shortened."""
    return _printable(text)[:SHOWN]


def _printable(text: str) -> str:
    """The text without secrets and control characters."""
    return secrets.scrub(printable(text).strip())


def as_result(report: LogReport) -> dict[str, Any]:
    """For `--json`."""
    return {
        "known": [
            {
                "name": hit.explained.name, "file": hit.file, "line": hit.line, "text": hit.text, "count": hit.count,
                "meaning": hit.explained.meaning, "hint": hit.explained.hint, "harmless": hit.explained.harmless,
            }
            for hit in _ordered(report)
        ],
        "unknown": report.unknown,
        "unknown_count": report.unknown_count,
        "bytes_read": report.bytes_read,
    }  # fmt: skip


def _ordered(report: LogReport) -> list[ErrorOccurrence]:
    return sorted(report.known.values(), key=lambda hit: hit.explained.harmless)


def as_text(report: LogReport) -> str:
    """The report as text: errors, then unknown ones, then harmless ones."""
    hits = _ordered(report)
    lines = [line for one in hits if not one.explained.harmless for line in _in_lines(one)]
    if report.unknown:
        lines.append(f"unknown errors: {report.unknown_count}, of which the first:")
        lines += [f"  {one['file']}:{one['line']}  {one['text']}" for one in report.unknown] + [""]
    lines += [line for one in hits if one.explained.harmless for line in _in_lines(one)]
    return "\n".join(lines).rstrip() or "no errors found"


def _in_lines(hit: ErrorOccurrence) -> list[str]:
    times = f", {hit.count} times" if hit.count > 1 else ""
    return [
        f"{'harmless' if hit.explained.harmless else 'error'}  {hit.file}:{hit.line}{times}",
        f"  {hit.text}",
        f"  {hit.explained.meaning}",
        f"  hint: {hit.explained.hint}",
        "",
    ]
