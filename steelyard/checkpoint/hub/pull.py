"""Fetching a model into a folder, so that whatever stops it costs nothing that has come.

A file comes under a temporary name that holds its digest, and takes its own name only when it is whole and its digest
is right. What has come of it is asked for no more, by this command or the next. `huggingface_hub` itself begins a
broken file again, which is why its downloader is used for the bytes and not for the folder.
"""

from __future__ import annotations

import fnmatch
import io
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath
from typing import Any

from steelyard.checkpoint.hub.repo_files import RemoteFile, is_name, listing, model_files
from steelyard.checkpoint.hub.session import talking
from steelyard.core import files, units
from steelyard.core.console import ProgressBar, console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError

STREAMS = 4  # Files under way at once.
KEPT = "what has come is kept; the same command goes on from there"


def pull(
    name: str, folder: Path, revision: str | None = None, include: Sequence[str] = (), overwrite: bool = False
) -> dict[str, Any]:
    """Bring a model of the hub into a folder. Only the files that make the model, or those that `include` matches."""
    if not is_name(name):
        raise UserError(f"{name} is no name on the hub", hint="a name is user/model")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", hint="name a folder")
    with talking(name, hint=KEPT):
        commit, remote = listing(name, revision)
        wanted = [remote[each] for each in _chosen(name, remote, include)]
        missing = [file for file in wanted if not _is_there(folder, file)]
        if not overwrite:
            _refuse_to_replace(folder, missing)
        _refuse_what_has_no_room(folder, missing)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _Pull(name, folder, commit, missing).run()
        except Interrupted:
            raise Interrupted(KEPT) from None
    return {
        "name": name,
        "folder": str(folder),
        "commit": commit,
        "files": [file.name for file in wanted],
        "fetched": [file.name for file in missing],
        "bytes": sum(file.size for file in missing),
        "left_out": sorted(remote.keys() - {file.name for file in wanted}),
    }


class _Pull:
    """Several files on their way into one folder."""

    def __init__(self, name: str, folder: Path, commit: str, wanted: list[RemoteFile]) -> None:
        self.name, self.folder, self.commit, self.wanted = name, folder, commit, wanted
        self.lock, self.stop = threading.Lock(), threading.Event()

    def run(self) -> None:
        """Fetch them all; the first failure stops the others where they are."""
        done = sum(part.stat().st_size for file in self.wanted if (part := self._part(file)).is_file())
        total = sum(file.size for file in self.wanted)
        with console.progress("pull", total, "B", done=done) as self.progress, ThreadPoolExecutor(STREAMS) as pool:
            jobs = [pool.submit(self._get, file) for file in self.wanted]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                self.stop.set()
                for job in jobs:
                    job.cancel()
                raise

    def _part(self, file: RemoteFile) -> Path:
        target = self.folder / file.name
        return target.with_name(f"{files.TEMPORARY}{file.digest[:16]}-{target.name}")

    def _get(self, file: RemoteFile) -> None:
        part = self._part(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with files.locked(part):
                self._complete(file, part)
                if not file.is_same(part):
                    part.unlink()
                    raise RuntimeFailure(
                        f"{file.name} did not arrive as it lies on the hub", hint="the same command tries again"
                    )
                files.sync_file(part)
                os.replace(part, self.folder / file.name)
        except BlockingIOError:
            raise UserError(f"another command is fetching {self.folder / file.name}", hint="wait for it") from None

    def _complete(self, file: RemoteFile, part: Path) -> None:
        """Fetch what is missing of a file. As long as something comes, a broken connection is not the end."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.name, file.name, revision=self.commit)
        while (before := part.stat().st_size) < file.size:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            try:
                with _Watched(part, self) as target:
                    http_get(url, target, resume_size=before, headers=headers, expected_size=file.size)
            except (OSError, HfHubHTTPError, _Stopped):
                raise
            except Exception:
                if part.stat().st_size <= before:
                    raise


class _Stopped(Exception):
    """Another file failed."""


class _Watched(io.BufferedWriter):
    """A file at whose end bytes arrive, which are counted."""

    def __init__(self, path: Path, pull: _Pull) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self.pull = pull

    def write(self, data: Any) -> int:
        if self.pull.stop.is_set():
            raise _Stopped
        with self.pull.lock:
            progress: ProgressBar = self.pull.progress
            progress.advance(len(data))
        return super().write(data)


def _chosen(name: str, remote: dict[str, RemoteFile], include: Sequence[str]) -> list[str]:
    if not include:
        chosen = model_files(remote)
    else:
        chosen = [each for each in remote if any(fnmatch.fnmatch(each, pattern) for pattern in include)]
    if not chosen:
        raise UserError(f"{name} holds no files of a model", hint=f"it holds: {', '.join(sorted(remote)[:20])}")
    for each in chosen:
        path = PurePosixPath(each)
        if path.is_absolute() or ".." in path.parts or "\\" in each:
            raise RuntimeFailure(f"{name} lists a file outside of itself: {each!r}; nothing was fetched")
    return chosen


def _is_there(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and file.is_same(path)


def _refuse_to_replace(folder: Path, missing: list[RemoteFile]) -> None:
    others = [file.name for file in missing if (folder / file.name).exists()]
    if others:
        raise UserError(
            f"{folder} holds other files of these names: {', '.join(others)}",
            hint="name another folder, or replace them with --overwrite",
        )


def _refuse_what_has_no_room(folder: Path, missing: list[RemoteFile]) -> None:
    came = sum(path.stat().st_size for path in folder.glob(f"**/{files.TEMPORARY}*") if path.is_file())
    need, free = sum(file.size for file in missing) - came, files.free_space(folder)
    if need > free:
        hint = "make room, or name a folder on another disk"
        raise RuntimeFailure(f"{folder} has room for {units.size(free)}, and {units.size(need)} are to come", hint=hint)
