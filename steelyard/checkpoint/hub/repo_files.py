"""The files of a repository on the hub, and which of them belong to the model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from steelyard.checkpoint.hub.session import hub_errors
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import UserError

# Files of a model other than weights. All others are not downloaded, but listed.
BESIDE = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template"
    r"|adapter_config|quantize_config|preprocessor_config)\.json"
    r"|(merges|vocab)\.txt|[\w.-]+\.(model|tiktoken|jinja)|recipe\.toml|SHA256SUMS|(README|LICENSE|NOTICE|USE_POLICY)[\w.-]*"
)
# A repository may have weights in several formats; the first one in this order is used.
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
    """The metadata of a file on the hub."""

    name: str
    size: int
    digest: str
    is_large: bool
    """Whether it is in large file storage, where the digest is SHA-256; otherwise it is Git's SHA-1."""

    def is_same(self, content: Path | bytes) -> bool:
        """Whether the file has this content."""
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
    """Whether a string is a valid model name on the hub: `user/model`, or `model` for old ones."""
    return NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def listing(name: str, revision: str | None = None) -> tuple[str, dict[str, RemoteFile]]:
    """The commit of a revision, and its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    commit = str(api.model_info(name, revision=revision).sha)
    remote = {}
    for entry in api.list_repo_tree(name, revision=commit, recursive=True):
        if isinstance(entry, RepoFile):
            digest = entry.blob_id if entry.lfs is None else entry.lfs.sha256
            remote[entry.path] = RemoteFile(entry.path, entry.size, digest, entry.lfs is not None)
    return commit, remote


def model_files(names: Iterable[str]) -> list[str]:
    """The files of the model: weights in one format, configuration, tokenizer, card and license."""
    names = sorted(names)
    kinds = ([name for name in names if kind.fullmatch(name)] for kind in WEIGHTS)
    weights: list[str] = next((files for files in kinds if files), [])
    return [name for name in names if name in weights or BESIDE.fullmatch(name)]


def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model in the cache of `huggingface_hub`, downloaded if necessary."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    if not is_name(name):
        raise UserError(f"{name} is not a valid model name on the hub", hint="a name is user/model")
    with hub_errors(name):
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(name, revision=revision, allow_patterns="config.json", local_files_only=True))
        commit, remote = listing(name, revision)
    with hub_errors(name, hint="complete files are kept; run the same command again to download the rest"):
        wanted = model_files(remote)
        if any(try_to_load_from_cache(name, each, revision=commit) is None for each in wanted):
            total = units.size(sum(remote[each].size for each in wanted))
            console.say(f"downloading {name} from the hub: {len(wanted)} files, {total}")
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
