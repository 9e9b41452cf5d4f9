"""Changes to the user's files that can be taken back exactly.

Before anything is changed, what stood there is written to the record (`places.record_file`), so that even a killed
repair is undone in full:

    {"changes": [{"kind": "folder", "path": ...},
                 {"kind": "link", "path": ..., "target": ..., "before": null or an earlier target},
                 {"kind": "file", "path": ..., "text": ..., "before": null or the earlier text}]}

What somebody changed since is left alone, and named.
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
    """One folder, link or file, as it should become and as it was."""

    kind: Literal["folder", "link", "file"]
    path: str
    target: str | None = None
    text: str | None = None
    before: str | None = None

    def in_words(self) -> str:
        """For the person who is asked."""
        if self.kind == "folder":
            return f"make the folder {self.path}"
        if self.kind == "link":
            instead = f" (now {self.before})" if self.before is not None else ""
            return f"link {self.path} -> {self.target}{instead}"
        shown = "".join(f"\n    | {line}" for line in (self.text or "").splitlines())
        return f"{'rewrite' if self.before is not None else 'write'} {self.path}:{shown}"


def folders_to(path: Path) -> list[Change]:
    """The folders that must be made for a path to be a folder, outermost first."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    return [Change("folder", str(place)) for place in reversed(missing)]


def link(path: Path, target: str) -> list[Change]:
    """A link of this name, unless it is there."""
    before = str(path.readlink()) if path.is_symlink() else None
    if before is None and path.exists():
        raise RuntimeFailure(f"{path} is a file, and no link is put in its place", hint="move it away")
    return [] if before == target else [Change("link", str(path), target=target, before=before)]


def file(path: Path, text: str) -> list[Change]:
    """A file with this text, unless it has it. Through a link, the file that it leads to."""
    path = path.resolve()
    before = text_of(path) if path.exists() else None
    return [] if before == text else [Change("file", str(path), text=text, before=before)]


def text_of(path: Path) -> str:
    """The text as it stands there, its line ends too: what is written back must be the same bytes."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("this is not text in UTF-8", where=str(path), hint="save it as UTF-8") from None


def apply(machine: Machine, changes: Sequence[Change]) -> None:
    """Make them in order, each noted before it is made."""
    record = record_file(machine)
    own = folders_to(record.parent)
    record.parent.mkdir(parents=True, exist_ok=True)
    _note(record, [*_noted(record), *own])
    for change in changes:
        if change.kind == "folder" and Path(change.path).exists():
            continue
        _note(record, [*_noted(record), change])
        _make(change)


def _make(change: Change) -> None:
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
    """The text, with the permissions that the file had."""
    mode = path.stat().st_mode & 0o7777 if path.exists() else None
    with files.atomic_file(path) as opened:
        if mode is not None:
            os.fchmod(opened.fileno(), mode)
        opened.write(text)


def undo(machine: Machine) -> tuple[list[str], list[str]]:
    """Take everything back, the last change first; what was taken back, and what was left and why."""
    record = record_file(machine)
    taken: list[str] = []
    left: list[str] = []
    noted = _noted(record)
    while noted:
        change = noted.pop()
        if change.path == str(record.parent):
            record.unlink(missing_ok=True)
        problem = _take_back(change)
        if problem is None:
            taken.append(change.path)
        elif problem:
            left.append(f"{change.path}: {problem}")
        if record.exists():
            _note(record, noted)
    record.unlink(missing_ok=True)
    return taken, left


def _take_back(change: Change) -> str | None:
    """None where it is as before; otherwise why not, or nothing where there was nothing to do."""
    path = Path(change.path)
    if change.kind == "folder":
        return _remove_folder(path)
    if change.kind == "link":
        if not path.is_symlink():
            return "is a file by now" if path.exists() else ""
        if str(path.readlink()) != change.target:
            return "" if str(path.readlink()) == change.before else f"leads to {path.readlink()!s} by now"
        if change.before is None:
            path.unlink()
        else:
            _make(Change("link", change.path, target=change.before))
        return None
    if not path.exists():
        return ""
    try:
        now = text_of(path)
    except UserError:
        return "was changed since"
    if now != change.text:
        return "" if now == change.before else "was changed since"
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
        return "is not empty by now"
    return None


def _noted(record: Path) -> list[Change]:
    try:
        text = record.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        noted: list[dict[str, Any]] = loads(text)["changes"]
        return [Change(**one) for one in noted]
    except (ValueError, KeyError, TypeError):
        raise RuntimeFailure(
            f"{record} cannot be read", hint="it says what was changed: look at it before you remove it"
        ) from None


def _note(record: Path, changes: Sequence[Change]) -> None:
    files.write_json(record, {"changes": [asdict(change) for change in changes]}, private=True)
