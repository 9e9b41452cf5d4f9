"""Finds the error lines of a log, and skips lines that only look like errors.

Libraries print warnings, notes and the names of error classes to standard error in healthy runs. A line counts if it
matches an error format of Python, CUDA, NCCL, MPI, Slurm, a shell or the kernel, and is not marked as a warning or
less. In a traceback, the line that names the exception counts, not the header. Indented lines after an error belong to
it: hints, differences between recipes, keys of a checkpoint. So do the next lines of the same rank after an exception,
such as NCCL's "Last error:".
"""

from __future__ import annotations

import re
from collections import deque

from steelyard.core.printable import without_control

# Every error contains one of these. Searching a whole chunk for them is ten times faster than a regex per line.
_SIGNS = (
    b"rror", b"xception", b"raceback", b"tion fault", b"core dumped", b"illed", b"ut of memory", b"ut-of-memory",
    b"oom", b"space left", b"quota exceeded", b"terminate called", b"undefined symbol", b"shared object", b"FATAL",
    b"CRITICAL", b"Fatal", b"mpirun", b"Aborted", b"not found", b"denied", b"No such file",
)  # fmt: skip
_ERROR = re.compile(
    r"""
    ^\S*(?:Error|Exception)\b(?::|$)          # ValueError: ..., torch.OutOfMemoryError: ...
    | ^(?:\S+:\s)?(?:fatal\s)?error:\s                  # error: ..., srun: error: ..., slurmstepd: error: ...
    | ^\S+:\s(?:.*:\s)?(?:command\ not\ found|[Pp]ermission\ denied|[Nn]o\ such\ file\ or\ directory)\s*$
    | \b(?:CUDA|NCCL|cuDNN|cuBLAS|CUBLAS)\ error\b | \bncclInternalError\b | \bncclSystemError\b
    | \bSegmentation\ fault\b | \bBus\ error\b | \bcore\ dumped\b | ^Killed\b | \bOut\ of\ memory:\ Killed\b
    | \boom[-_]kill\b | \bout-of-memory\ handler\b | \bNo\ space\ left\ on\ device\b | \bDisk\ quota\ exceeded\b
    | ^terminate\ called\b | \bundefined\ symbol\b | \bcannot\ open\ shared\ object\ file\b
    | \b(?:FATAL|CRITICAL)\b | ^Fatal\b | \bmpirun\ (?:noticed|has\ exited)\b | ^Aborted\b
    """,
    re.VERBOSE,
)
_LESS = re.compile(
    r"""
    (?i:\bwarn(?:ing|ings)?\b) | (?i:warning:) | \[W\d{3,4}\ | ^W\d{4}\ \d\d:\d\d | \b(?:INFO|DEBUG|NOTE|WARN)\b
    | (?i:\bignored\b|\bignoring\b|\bretrying\b|\bwill\ retry\b|\bharmless\b|\bno\ errors?\b|\b0\ errors?\b)
    | ^error:\ interrupted\b                             # requested by the user
    | \berror_file\b | ^\s*(?:File\ "|\^|~|\|\s*$)      # parts of tracebacks
    | CUPTI_ERROR_|\bKineto\b|cuptiGetLastError         # a profiler without permissions; training continues
    | Unable\ to\ register\ cu(?:DNN|FFT|BLAS)\ factory
    """,
    re.VERBOSE,
)
_RANK = re.compile(r"^(?:\[(?:rank)?\d+(?:,\d+)?\](?:<std\w+>)?:?\s?|\d+:\s)+")
_CONTINUES = re.compile(r"(?!Traceback|During handling|The above exception|Exception |\[)\S")
_ANNOUNCED = "Traceback (most recent call last)"
LONGEST, KEPT = 500, 500
MOST_LINES = 12  # of one error


class ErrorScan:
    """Scans one growing log and keeps its errors with their byte offsets."""

    def __init__(self) -> None:
        self._first: list[tuple[int, str]] = []
        self._last: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self.count = 0
        """Total number of errors, including dropped ones."""
        self.scanned_to = 0
        """File offset at which the last scan ended."""
        self._in_ignored = False
        self._is_announced = False
        self._continues = 0
        """How many more lines may belong to the last error."""
        self._rank = ""
        """The prefix of its lines, if it is an exception of a rank."""

    @property
    def found(self) -> list[tuple[int, str]]:
        """The kept errors, in file order."""
        return [*self._first, *self._last]

    def scan(self, chunk: bytes, begins: int = 0) -> None:
        """Scan new complete lines; `begins` is the file offset of the first."""
        at, self.scanned_to = 0, begins + len(chunk)
        for start, end in _suspects(chunk):
            # Lines after a traceback header belong to it, whether they contain a sign or not.
            while self._is_inside and at < start:
                at = self._consider_line(chunk, at, begins)
            if start >= at:
                self._consider(clean(chunk[start:end]), begins + start)
                at = end + 1
        while self._is_inside and at < len(chunk):
            at = self._consider_line(chunk, at, begins)

    @property
    def _is_inside(self) -> bool:
        return self._is_announced or self._in_ignored or self._continues > 0

    def _consider_line(self, chunk: bytes, at: int, begins: int) -> int:
        end = chunk.find(b"\n", at)
        end = len(chunk) if end < 0 else end
        self._consider(clean(chunk[at:end]), begins + at)
        return end + 1

    def begin_anew(self) -> None:
        """Reset the traceback state: the next chunk is from another part of the file."""
        self._in_ignored, self._is_announced, self._continues = False, False, 0

    def forget(self) -> None:
        """Reset everything: the file was replaced."""
        self.__init__()  # type: ignore[misc]

    def _consider(self, line: str, place: int) -> None:
        text = _RANK.sub("", line)
        if self._continues > 0:
            self._continues -= 1
            is_indented = text[:1].isspace() and text.strip() and not is_error(line.strip())
            is_of_rank = (
                self._rank and line.startswith(self._rank) and _CONTINUES.match(text) and not _LESS.search(text)
            )
            if is_indented or is_of_rank:
                self._extend(text)
                return
            self._continues = 0
        if text.startswith("Exception ignored"):
            self._in_ignored = True
            return
        if _ANNOUNCED in text:
            self._is_announced = True
            return
        if self._in_ignored or self._is_announced:
            if not text or text[0] in " \t|+":
                return  # Frames of a traceback.
            was_ignored, self._in_ignored, self._is_announced = self._in_ignored, False, False
            if was_ignored:
                return
            if re.match(r"[\w.]+(?::|$)", text):  # The name of the exception class.
                self._keep(place, text)
                self._rank = line.removesuffix(text)
                return
        if is_error(line):
            self._keep(place, text)

    def _keep(self, place: int, text: str) -> None:
        """Keep the first and the last errors. The first are causes, the last may be from a later attempt."""
        self.count += 1
        self._continues, self._rank = MOST_LINES - 1, ""
        (self._first if len(self._first) < KEPT else self._last).append((place, text[:LONGEST]))

    def _extend(self, text: str) -> None:
        """Add a line to the last error."""
        errors = self._last or self._first
        place, before = errors[-1]
        errors[-1] = place, f"{before}\n{text.rstrip()[:LONGEST]}"


def _suspects(chunk: bytes) -> list[tuple[int, int]]:
    """The start and end of each line that contains a sign."""
    lines: dict[int, int] = {}
    for sign in _SIGNS:
        at = chunk.find(sign)
        while at >= 0:
            start, end = chunk.rfind(b"\n", 0, at) + 1, chunk.find(b"\n", at)
            end = len(chunk) if end < 0 else end
            lines[start] = end
            at = chunk.find(sign, end)
    return sorted(lines.items())


def is_error(line: str) -> bool:
    """Whether a line alone reports a failure."""
    text = _RANK.sub("", line)
    return bool(_ERROR.search(text)) and not _LESS.search(text)


def is_lost_peer(text: str) -> bool:
    """Whether the text only reports that a peer rank is gone, which is never the root cause."""
    signs = ("lost another rank", "Connection closed by peer", "Connection reset")
    return any(sign in text for sign in signs)


def clean(line: bytes | str) -> str:
    """A log line without terminal control sequences; for a progress bar, its last state."""
    text = line[-65536:].decode("utf-8", "replace") if isinstance(line, bytes) else line
    text = text.rstrip("\r\n").rpartition("\r")[2]
    return without_control(text).expandtabs(4)
