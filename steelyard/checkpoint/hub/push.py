"""Sending a model to the hub as one commit.

Large files go ahead, one by one; the hub keeps what has arrived, whether or not a commit follows. The commit comes
last, so that nobody ever sees half of a model, and holds only what differs from what lies there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.checkpoint.hub.repo_files import WEIGHTS, RemoteFile, listing
from steelyard.checkpoint.hub.session import talking
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError

LARGE = 1 << 20
Contents = Mapping[str, Path | bytes]


def push(name: str, contents: Contents, private: bool = False, keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make a repository hold these files, and return what that took. Names in `keep` stay as they are on the hub."""
    arrived: list[str] = []
    try:
        with talking(name):
            _have_repository(name, private)
            commit, remote = listing(name)
            kept = [each for each in keep if each in remote and each in contents]
            changed = {
                each: content
                for each, content in contents.items()
                if each not in kept and not (each in remote and remote[each].is_same(content))
            }
            stale = _stale(contents, remote)
            if changed or stale:
                commit = _commit(name, changed, stale, arrived)
    except (RuntimeFailure, Interrupted) as trouble:
        reported = f"{', '.join(arrived)} arrived" if arrived else "nothing was sent"
        reported += "; nothing is published yet; the same command sends only what is missing"
        if isinstance(trouble, Interrupted):
            raise Interrupted(reported) from None
        trouble.hint = reported
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


def _have_repository(name: str, private: bool) -> None:
    """Find the repository or make it. One that all can see is not taken for one that was to be private."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    try:
        found = api.model_info(name)
    except RepositoryNotFoundError:
        api.create_repo(name, private=private or None, exist_ok=True)
        found = api.model_info(name)
    if private and not found.private:
        raise UserError(
            f"{name} is on the hub already, and public; nothing was sent",
            hint="make it private on its settings page, drop --private, or choose another name",
        )


def _stale(contents: Contents, remote: dict[str, RemoteFile]) -> list[str]:
    """Weights that an earlier version left and that this one has under other names."""
    return [each for each in sorted(remote) if WEIGHTS[0].fullmatch(each) and each not in contents]


def _commit(name: str, changed: Contents, stale: list[str], arrived: list[str]) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    additions = [CommitOperationAdd(each, _given(content)) for each, content in sorted(changed.items())]
    total = sum(_size(content) for content in changed.values())
    with console.progress("push", total, "B") as progress:
        for addition in additions:
            size = _size(changed[addition.path_in_repo])
            if size >= LARGE or addition.path_in_repo.endswith(".safetensors"):
                console.say(f"sending {addition.path_in_repo}, {units.size(size)}")
                api.preupload_lfs_files(name, [addition], free_memory=False)
                arrived.append(addition.path_in_repo)
            progress.advance(size)
        deletions = [CommitOperationDelete(each, is_folder=False) for each in stale]
        made = api.create_commit(name, [*additions, *deletions], commit_message="Publish with Steelyard")
    return str(made.oid)


def _given(content: Path | bytes) -> str | bytes:
    return content if isinstance(content, bytes) else str(content)


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size
