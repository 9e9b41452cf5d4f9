"""Upload a model to the hub as one commit.

Large files are uploaded first, one by one; the hub keeps them even if no commit follows. The commit comes last, so a
partial model is never visible, and contains only the files that differ from those on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.checkpoint.hub.repo_files import WEIGHTS, RemoteFile, listing
from steelyard.checkpoint.hub.session import hub_errors
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError

LARGE = 1 << 20
Contents = Mapping[str, Path | bytes]


def push(name: str, contents: Contents, private: bool = False, keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """Upload these files to a repository, and return a summary. Files in `keep` are not overwritten on the hub."""
    uploaded: list[str] = []
    try:
        with hub_errors(name):
            _find_or_create_repository(name, private)
            commit, remote = listing(name)
            kept = [each for each in keep if each in remote and each in contents]
            changed = {
                each: content
                for each, content in contents.items()
                if each not in kept and not (each in remote and remote[each].is_same(content))
            }
            stale = _stale(contents, remote)
            if changed or stale:
                commit = _commit(name, changed, stale, uploaded)
    except (RuntimeFailure, Interrupted) as error:
        hint = f"uploaded: {', '.join(uploaded)}" if uploaded else "nothing was uploaded"
        hint += "; nothing is published yet; run the same command again to upload the rest"
        if isinstance(error, Interrupted):
            raise Interrupted(hint) from None
        error.hint = hint
        raise
    return {
        "name": name,
        "commit": commit,
        "sent": sorted(changed),
        "bytes": sum(_size(content) for content in changed.values()),
        "unchanged": sorted(contents.keys() - changed.keys() - set(kept)),
        "kept": kept,
        "removed": stale,
    }


def _find_or_create_repository(name: str, private: bool) -> None:
    """Create the repository if it does not exist. Raises if it exists and is public, but `private` is set."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    try:
        info = api.model_info(name)
    except RepositoryNotFoundError:
        api.create_repo(name, private=private or None, exist_ok=True)
        info = api.model_info(name)
    if private and not info.private:
        raise UserError(
            f"{name} already exists on the hub and is public; nothing was uploaded",
            hint="make it private on its settings page, drop --private, or choose another name",
        )


def _stale(contents: Contents, remote: dict[str, RemoteFile]) -> list[str]:
    """Weights of an earlier version that this one does not have."""
    return [each for each in sorted(remote) if WEIGHTS[0].fullmatch(each) and each not in contents]


def _commit(name: str, changed: Contents, stale: list[str], uploaded: list[str]) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    additions = [CommitOperationAdd(each, _path_or_bytes(content)) for each, content in sorted(changed.items())]
    total = sum(_size(content) for content in changed.values())
    with console.progress("push", total, "B") as progress:
        for addition in additions:
            size = _size(changed[addition.path_in_repo])
            if size >= LARGE or addition.path_in_repo.endswith(".safetensors"):
                console.say(f"uploading {addition.path_in_repo}, {units.size(size)}")
                api.preupload_lfs_files(name, [addition], free_memory=False)
                uploaded.append(addition.path_in_repo)
            progress.advance(size)
        deletions = [CommitOperationDelete(each, is_folder=False) for each in stale]
        commit = api.create_commit(name, [*additions, *deletions], commit_message="Publish with Steelyard")
    return str(commit.oid)


def _path_or_bytes(content: Path | bytes) -> str | bytes:
    return content if isinstance(content, bytes) else str(content)


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size
