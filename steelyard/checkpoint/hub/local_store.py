"""Repositories of a local hub as plain folders, so that a model copied there by hand is served too.

    DIR/models/ORG/NAME/...          the files of a model; DIR/datasets/ORG/NAME/... those of a dataset
    DIR/models/ORG/NAME@BRANCH/...   the files of another branch; a slash in its name is written --
    DIR/.hub/objects/SHA256          large files that were uploaded, until a commit uses them
    DIR/.hub/repositories.json       {"models/ORG/NAME": {"private": true, "commits": ["message", ...]}}
    DIR/.hub/digests.json            {"path": [size, modified, sha256]}

A commit builds the new folder beside the old one, from links to unchanged files, and then replaces it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import SteelyardError
from steelyard.core.safe_parse import read_json_object

KEY = re.compile(r"(?:models|datasets)(?:/[A-Za-z0-9][A-Za-z0-9._-]*){1,2}")
BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
MAIN, OWN = "main", ".hub"
LARGE_FROM = 20_000  # bytes
LARGE_NAMES = (".safetensors", ".bin", ".model", ".parquet", ".gguf", ".gz", ".zst")
BLOCK = 1 << 20


class HubStore:
    """The repositories below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.RLock()
        self.objects = folder / OWN / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.settings = _read(folder / OWN / "repositories.json")
        self._digests = _read(folder / OWN / "digests.json")

    def create(self, key: str, private: bool) -> None:
        """Create an empty repository."""
        with self.lock:
            files.write_text(
                self.folder / key / ".gitattributes", "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
            )
            self.settings[key] = {"private": private, "commits": []}
            self._save()

    def names(self) -> list[str]:
        """All repositories."""
        patterns = [f"{kind}/{depth}" for kind in ("models", "datasets") for depth in ("*", "*/*")]
        found = [path for pattern in patterns for path in self.folder.glob(pattern) if path.is_dir()]
        keys = sorted(
            path.relative_to(self.folder).as_posix() for path in found if any(map(Path.is_file, path.iterdir()))
        )
        return [key for key in keys if KEY.fullmatch(key)]

    def find(self, key: str, revision: str = MAIN) -> Repository | None:
        """A repository at a branch, or at the newest commit of its main branch."""
        if not KEY.fullmatch(key):
            return None
        folder = self.folder / key
        if not folder.is_dir():
            return None
        main = Repository(self, key, folder)
        if revision in (MAIN, main.sha):
            return main
        branch = folder.with_name(f"{folder.name}@{revision.replace('/', '--')}")
        if BRANCH.fullmatch(revision) and branch.is_dir():
            return Repository(self, key, branch)
        others = (Repository(self, key, path) for path in folder.parent.glob(f"{folder.name}@*"))
        return next((each for each in others if each.sha == revision), None)

    def digest(self, path: Path) -> str:
        """The SHA-256 of a file, computed once for each version of it."""
        status = path.stat()
        known = self._digests.get(str(path.relative_to(self.folder)))
        if known is not None and known[:2] == [status.st_size, status.st_mtime_ns]:
            return str(known[2])
        with open(path, "rb") as file:
            return self._note(path, hashlib.file_digest(file, "sha256").hexdigest())

    def _note(self, path: Path, digest: str) -> str:
        status = path.stat()
        self._digests[str(path.relative_to(self.folder))] = [status.st_size, status.st_mtime_ns, digest]
        return digest

    def prepare(self) -> None:
        """Compute the missing digests, because a client does not wait for those of large files."""
        large = [
            path for key in self.names() for path in Repository(self, key, self.folder / key).paths().values()
            if is_large(path.name, path.stat().st_size)
        ]  # fmt: skip
        with console.progress("digests", sum(path.stat().st_size for path in large), "B") as progress:
            for path in large:
                self.digest(path)
                progress.advance(path.stat().st_size)
        with self.lock:
            self._save()

    def commit(self, key: str, message: str, added: Mapping[str, bytes | Path], deleted: Iterable[str]) -> None:
        """Add, replace and delete files of a repository."""
        with self.lock:
            repository = Repository(self, key, self.folder / key)
            gone = {*added, *deleted}
            kept = {name: path for name, path in repository.paths().items() if name not in gone}
            with files.temporary_folder(repository.folder) as new:
                for name, content in {**kept, **added}.items():
                    target = new / _safe(name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if isinstance(content, bytes):
                        target.write_bytes(content)
                    else:
                        _link(content, target)
                # Its files are kept until the new folder is in place.
                old = files.temporary_beside(repository.folder.with_name(f"old-{repository.folder.name}"))
                os.rename(repository.folder, old)
                os.rename(new, repository.folder)
                shutil.rmtree(old, ignore_errors=True)
            for name, content in added.items():
                if isinstance(content, Path):
                    self._note(repository.folder / name, content.name)
                    content.unlink(missing_ok=True)
            self.settings.setdefault(key, {"private": False, "commits": []})["commits"].append(message)
            self._save()

    def _save(self) -> None:
        files.write_json(self.folder / OWN / "repositories.json", self.settings)
        files.write_json(self.folder / OWN / "digests.json", self._digests)


class Repository:
    """One branch of a repository."""

    def __init__(self, store: HubStore, key: str, folder: Path) -> None:
        self.store, self.key, self.folder = store, key, folder

    @property
    def private(self) -> bool:
        """Whether only the owner of the token sees it."""
        return bool(self.store.settings.get(self.key, {}).get("private"))

    @property
    def sha(self) -> str:
        """The id of the newest commit: a digest of the files' names, sizes and times."""
        listed = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in self.paths().items()]
        commits = self.store.settings.get(self.key, {}).get("commits", [])
        return hashlib.sha1(repr((listed, commits)).encode()).hexdigest()

    def paths(self) -> dict[str, Path]:
        """All files by name. Links that leave their folder are not served."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            try:
                if path.is_file() and not path.name.startswith(files.TEMPORARY):
                    found[path.relative_to(self.folder).as_posix()] = files.inside(path)
            except SteelyardError:
                continue
        return found

    def entry(self, name: str, path: Path) -> dict[str, Any]:
        """A file as the tree lists it."""
        size = path.stat().st_size
        made: dict[str, Any] = {"type": "file", "path": name, "size": size}
        if not is_large(name, size):
            return made | {"oid": git_oid(path.read_bytes())}
        digest = self.store.digest(path)
        return made | {"oid": digest[:40], "lfs": {"oid": digest, "size": size, "pointerSize": 130}}


def is_large(name: str, size: int) -> bool:
    """Whether a file is uploaded on its own, before the commit."""
    return name.endswith(LARGE_NAMES) or size >= LARGE_FROM


def git_oid(content: bytes) -> str:
    """The id of a small file in git."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _safe(name: str) -> str:
    if not name or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not a file name")
    return name


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # Another file system, or one without links.
        shutil.copy2(source, target)


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
