"""Download a model into a folder, so that an interrupted download can be resumed.

A file is downloaded under a temporary name that contains its digest, and renamed when it is complete and its digest
matches. This command or the next one resumes a partial file. `huggingface_hub` restarts a partial file, so only its
HTTP download function is used here.
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
from steelyard.checkpoint.hub.session import hub_errors
from steelyard.core import files, units
from steelyard.core.console import ProgressBar, console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError

STREAMS = 4  # files that are downloaded at the same time
RESUMABLE = "the data received so far is kept; run the same command again to resume"


def pull(
    name: str, folder: Path, revision: str | None = None, include: Sequence[str] = (), overwrite: bool = False
) -> dict[str, Any]:
    """Download a model of the hub into a folder: only the files of the model, or those that `include` matches."""
    if not is_name(name):
        raise UserError(f"{name} is not a valid model name on the hub", hint="a name is user/model")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", hint="pass a folder")
    with hub_errors(name, hint=RESUMABLE):
        commit, remote = listing(name, revision)
        wanted = [remote[each] for each in _selected(name, remote, include)]
        missing = [file for file in wanted if not _is_downloaded(folder, file)]
        if not overwrite:
            _check_existing(folder, missing)
        _check_free_space(folder, missing)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _Pull(name, folder, commit, missing).run()
        except Interrupted:
            raise Interrupted(RESUMABLE) from None
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
    """A download of several files into one folder."""

    def __init__(self, name: str, folder: Path, commit: str, wanted: list[RemoteFile]) -> None:
        self.name, self.folder, self.commit, self.wanted = name, folder, commit, wanted
        self.lock, self.stop = threading.Lock(), threading.Event()

    def run(self) -> None:
        """Download all files; the first failure stops the others."""
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
                        f"{file.name} does not match its digest on the hub", hint="run the same command again"
                    )
                files.sync_file(part)
                os.replace(part, self.folder / file.name)
        except BlockingIOError:
            raise UserError(f"another command is downloading {self.folder / file.name}", hint="wait for it") from None

    def _complete(self, file: RemoteFile, part: Path) -> None:
        """Download the rest of a file. Retries after a broken connection as long as some data arrives."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.name, file.name, revision=self.commit)
        while (before := part.stat().st_size) < file.size:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            try:
                with _CountingWriter(part, self) as target:
                    http_get(url, target, resume_size=before, headers=headers, expected_size=file.size)
            except (OSError, HfHubHTTPError, _Stopped):
                raise
            except Exception:
                if part.stat().st_size <= before:
                    raise


class _Stopped(Exception):
    """Another file failed."""


class _CountingWriter(io.BufferedWriter):
    """Appends to a file and reports progress."""

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


def _selected(name: str, remote: dict[str, RemoteFile], include: Sequence[str]) -> list[str]:
    if not include:
        selected = model_files(remote)
    else:
        selected = [each for each in remote if any(fnmatch.fnmatch(each, pattern) for pattern in include)]
    if not selected:
        raise UserError(f"{name} has no model files", hint=f"it has: {', '.join(sorted(remote)[:20])}")
    for each in selected:
        path = PurePosixPath(each)
        if path.is_absolute() or ".." in path.parts or "\\" in each:
            raise RuntimeFailure(f"{name} lists a file outside of its folder: {each!r}; nothing was downloaded")
    return selected


def _is_downloaded(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and file.is_same(path)


def _check_existing(folder: Path, missing: list[RemoteFile]) -> None:
    others = [file.name for file in missing if (folder / file.name).exists()]
    if others:
        raise UserError(
            f"{folder} has other files with these names: {', '.join(others)}",
            hint="choose another folder, or replace them with --overwrite",
        )


def _check_free_space(folder: Path, missing: list[RemoteFile]) -> None:
    received = sum(path.stat().st_size for path in folder.glob(f"**/{files.TEMPORARY}*") if path.is_file())
    need, free = sum(file.size for file in missing) - received, files.free_space(folder)
    if need > free:
        hint = "free some space, or choose a folder on another disk"
        raise RuntimeFailure(f"{folder} has {units.size(free)} free, but needs {units.size(need)} more", hint=hint)
