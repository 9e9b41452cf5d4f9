"""The error file: the last error of a rank, as one small JSON file, named by STEELYARD_ERROR_FILE.

    {"kind": "UserError", "message": "...", "exit_code": 2, "time": 1700000000.0, "lost_peer": false, "shared": false}

When one rank fails, many others fail too. `lost_peer` marks ranks that only noticed, `shared` an error that all ranks
raise, so that the launcher can report the root cause.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from steelyard.core import files
from steelyard.core.safe_parse import read_object

ERROR_FILE = "STEELYARD_ERROR_FILE"


@dataclass(frozen=True)
class ErrorRecord:
    """Why a rank ended."""

    kind: str
    message: str
    exit_code: int
    time: float
    lost_peer: bool = False
    shared: bool = False
    agreed: bool = False
    """All ranks agreed to stop, and each saves its shard."""


def leave(path: Path, record: ErrorRecord) -> None:
    """Write the record atomically."""
    files.write_json(path, asdict(record))


def find(path: Path) -> ErrorRecord | None:
    """The record that a rank wrote, or None."""
    try:
        return ErrorRecord(**read_object(path))
    except TypeError:  # There is no complete record.
        return None
