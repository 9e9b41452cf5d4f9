"""What lies in a repository of the hub, and which of it makes a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from steelyard.checkpoint.hub.session import talking
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import UserError

# The files beside the weights that belong to a model. Others are left where they are, and named.
BESIDE = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template"
    r"|adapter_config|quantize_config|preprocessor_config)\.json"
    r"|(merges|vocab)\.txt|[\w.-]+\.(model|tiktoken|jinja)|recipe\.toml|SHA256SUMS|(README|LICENSE|NOTICE|USE_POLICY)[\w.-]*"
)
# Weights come under several names in one repository; the first kind that is there is the model.
WEIGHTS = (
    re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"),
    re.compile(r"adapter_model\.safetensors"),
    re.compile(r"[\w.-]+\.safetensors(\.index\.json)?"),
    re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?"),
    re.compile(r"[\w.-]+\.gguf"),
)
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub, as far as is known without fetching it."""

    name: str
    size: int
    digest: str
    is_large: bool
    """Whether it lies in the large file storage, where SHA-256 names content; elsewhere Git's SHA-1 does."""

    def is_same(self, content: Path | bytes) -> bool:
        """Whether this is what the file holds."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        return size == self.size and self.digest == _digest(content, size, self.is_large)


def _digest(content: Path | bytes, size: int, is_large: bool) -> str:
    digest = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with open(content, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def is_name(text: str) -> bool:
    """Whether a word could be a model's name on the hub: `user/model`, or `model` for the old ones."""
    return NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def listing(name: str, revision: str | None = None) -> tuple[str, dict[str, RemoteFile]]:
    """The commit a revision stands for, and the files it holds."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    commit = str(api.model_info(name, revision=revision).sha)
    found = {}
    for entry in api.list_repo_tree(name, revision=commit, recursive=True):
        if isinstance(entry, RepoFile):
            digest = entry.blob_id if entry.lfs is None else entry.lfs.sha256
            found[entry.path] = RemoteFile(entry.path, entry.size, digest, entry.lfs is not None)
    return commit, found


def model_files(names: Iterable[str]) -> list[str]:
    """Those of the files that make the model: one kind of weights, configuration, tokenizer, card and license."""
    names = sorted(names)
    kinds = ([name for name in names if kind.fullmatch(name)] for kind in WEIGHTS)
    weights: list[str] = next((found for found in kinds if found), [])
    return [name for name in names if name in weights or BESIDE.fullmatch(name)]


def fetch(name: str, revision: str | None = None) -> Path:
    """A model of the hub as a folder in `huggingface_hub`'s cache, fetched if it is not there."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    if not is_name(name):
        raise UserError(f"{name} is no name on the hub", hint="a name is user/model")
    with talking(name):
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(name, revision=revision, allow_patterns="config.json", local_files_only=True))
        commit, found = listing(name, revision)
    with talking(name, hint="whole files are kept; the same command fetches the others"):
        wanted = model_files(found)
        if any(try_to_load_from_cache(name, each, revision=commit) is None for each in wanted):
            total = units.size(sum(found[each].size for each in wanted))
            console.say(f"{name} comes from the hub: {len(wanted)} files, {total}")
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
