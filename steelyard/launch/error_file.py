"""What a rank says before it ends: one small JSON file, named by STEELYARD_ERROR_FILE.

    {"kind": "UserError", "message": "...", "exit_code": 2, "time": 1700000000.0, "lost_peer": false, "shared": false}

Many ranks fail when one does. `lost_peer` marks those that only noticed, `shared` those that all say the same, so that
the launcher can tell a person the one error that counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from steelyard.core import files
from steelyard.core.safe_parse import loads

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
    """All ranks agreed to stop, and each saves its part."""


def leave(path: Path, words: ErrorRecord) -> None:
    """Write them down, whole or not at all."""
    files.write_json(path, asdict(words))


def find(path: Path) -> ErrorRecord | None:
    """What a rank left, if it left anything."""
    try:
        return ErrorRecord(**loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
