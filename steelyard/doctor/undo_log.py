"""Changes to the user's files that can be undone exactly.

Before a change, the previous content is written to the record (`paths.record_file`), so that even an interrupted repair
can be undone completely:

    {"changes": [{"kind": "folder", "path": ...},
                 {"kind": "link", "path": ..., "target": ..., "before": null or an earlier target},
                 {"kind": "file", "path": ..., "text": ..., "before": null or the earlier text}]}

Files that were modified since are not touched, but reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from steelyard.core import files
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.safe_parse import loads
from steelyard.doctor.machine import Machine
from steelyard.doctor.paths import record_file


@dataclass(frozen=True)
class Change:
    """One folder, link or file: its new and its previous content."""

    kind: Literal["folder", "link", "file"]
    path: str
    target: str | None = None
    text: str | None = None
    before: str | None = None

    def in_words(self) -> str:
        """The change as text, for the confirmation."""
        if self.kind == "folder":
            return f"create the folder {self.path}"
        if self.kind == "link":
            instead = f" (now {self.before})" if self.before is not None else ""
            return f"link {self.path} -> {self.target}{instead}"
        shown = "".join(f"\n    | {line}" for line in (self.text or "").splitlines())
        return f"{'rewrite' if self.before is not None else 'write'} {self.path}:{shown}"


def folders_to(path: Path) -> list[Change]:
    """The folders to create so that a path exists, outermost first."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    return [Change("folder", str(place)) for place in reversed(missing)]


def link(path: Path, target: str) -> list[Change]:
    """The change that creates this link; empty if it exists."""
    before = str(path.readlink()) if path.is_symlink() else None
    if before is None and path.exists():
        raise RuntimeFailure(f"{path} is a file, which is not replaced with a link", hint="move it away")
    return [] if before == target else [Change("link", str(path), target=target, before=before)]


def file(path: Path, text: str) -> list[Change]:
    """The change that gives a file this text; empty if it has it. A link is followed."""
    path = path.resolve()
    before = text_of(path) if path.exists() else None
    return [] if before == text else [Change("file", str(path), text=text, before=before)]


def text_of(path: Path) -> str:
    """The text of a file with its line endings, so that the same bytes can be written back."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("the file is not UTF-8", where=str(path), hint="save it as UTF-8") from None


def apply(machine: Machine, changes: Sequence[Change]) -> None:
    """Apply the changes in order. Each is recorded before it is applied."""
    record = record_file(machine)
    own = folders_to(record.parent)
    record.parent.mkdir(parents=True, exist_ok=True)
    _write_record(record, [*_read_record(record), *own])
    for change in changes:
        if change.kind == "folder" and Path(change.path).exists():
            continue
        _write_record(record, [*_read_record(record), change])
        _apply(change)


def _apply(change: Change) -> None:
    path = Path(change.path)
    if change.kind == "folder":
        path.mkdir(exist_ok=True)
    elif change.kind == "link":
        temporary = files.temporary_beside(path)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(change.target or "")
        os.replace(temporary, path)
    else:
        _write(path, change.text or "")


def _write(path: Path, text: str) -> None:
    """Write the text and keep the file's permissions."""
    mode = path.stat().st_mode & 0o7777 if path.exists() else None
    with files.atomic_file(path) as opened:
        if mode is not None:
            os.fchmod(opened.fileno(), mode)
        opened.write(text)


def undo(machine: Machine) -> tuple[list[str], list[str]]:
    """Undo all changes, the last one first. Returns the undone paths, and those left with the reason."""
    record = record_file(machine)
    undone: list[str] = []
    left: list[str] = []
    recorded = _read_record(record)
    while recorded:
        change = recorded.pop()
        if change.path == str(record.parent):
            record.unlink(missing_ok=True)
        problem = _undo_change(change)
        if problem is None:
            undone.append(change.path)
        elif problem:
            left.append(f"{change.path}: {problem}")
        if record.exists():
            _write_record(record, recorded)
    record.unlink(missing_ok=True)
    return undone, left


def _undo_change(change: Change) -> str | None:
    """None if the change was undone; otherwise the reason, or an empty string if there was nothing to undo."""
    path = Path(change.path)
    if change.kind == "folder":
        return _remove_folder(path)
    if change.kind == "link":
        if not path.is_symlink():
            return "is now a file" if path.exists() else ""
        if str(path.readlink()) != change.target:
            return "" if str(path.readlink()) == change.before else f"now points to {path.readlink()!s}"
        if change.before is None:
            path.unlink()
        else:
            _apply(Change("link", change.path, target=change.before))
        return None
    if not path.exists():
        return ""
    try:
        now = text_of(path)
    except UserError:
        return "was modified since"
    if now != change.text:
        return "" if now == change.before else "was modified since"
    if change.before is None:
        path.unlink()
    else:
        _write(path, change.before)
    return None


def _remove_folder(path: Path) -> str | None:
    try:
        path.rmdir()
    except FileNotFoundError:
        return ""
    except OSError:
        return "is not empty"
    return None


def _read_record(record: Path) -> list[Change]:
    try:
        text = record.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        recorded: list[dict[str, Any]] = loads(text)["changes"]
        return [Change(**one) for one in recorded]
    except (ValueError, KeyError, TypeError):
        raise RuntimeFailure(
            f"{record} cannot be read", hint="it records the changes: inspect it before you delete it"
        ) from None


def _write_record(record: Path, changes: Sequence[Change]) -> None:
    files.write_json(record, {"changes": [asdict(change) for change in changes]}, private=True)
