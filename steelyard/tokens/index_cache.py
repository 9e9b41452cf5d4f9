"""A cache of index maps on disk, with Megatron's file names.

New names, in `<prefix>/cache/GPTDataset_indices/` or `data.index_cache`:

    <md5>-GPTDataset-<split>-description.txt                              what the arrays were built from, as JSON
    <md5>-GPTDataset-<split>-{document,sample,shuffle}_index.npy

Old names, next to the token files or in `data.index_cache`:

    <prefix>_<split>_indexmap_<samples>ns_<length>sl_<seed>s_{doc,sample,shuffle}_idx.npy

Arrays that Megatron wrote under either name are used. A description is compared only by the keys that determine the
arrays, so the name of the tokenizer in it does not matter. A matching name is not enough: arrays are used only if they
map the sequences that the token files have now, so maps of text that was replaced are built again.

Any number of processes may use the cache: one per host builds while the others wait. Files are written by rename, so if
locks do not work across hosts, some hosts do the same work twice, without other harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.safe_parse import read_object
from steelyard.tokens import index_maps
from steelyard.tokens.index_maps import IndexMaps

Names = Literal["new", "old"]
NEW_PARTS = ("document_index", "sample_index", "shuffle_index")
OLD_PARTS = ("doc_idx", "sample_idx", "shuffle_idx")


@dataclass(frozen=True)
class IndexRequest:
    """Everything that determines index maps, by Megatron's names."""

    dataset_path: str
    num_samples: int
    index_split: str
    random_seed: int
    sequence_length: int
    split: str

    def description(self) -> str:
        """The JSON that Megatron writes next to the arrays; its hash is in their names."""
        return json.dumps({"class": "GPTDataset", **asdict(self)}, indent=4)


def index_maps_for(
    request: IndexRequest, lengths: npt.NDArray[np.int32], bounds: tuple[int, int], folder: str | None, names: Names
) -> IndexMaps:
    """The maps from the cache; if they are missing, they are built and added to it."""
    expected = index_maps.plan(lengths, bounds, request.num_samples, request.sequence_length)
    target = _new_folder(request, folder) if names == "new" else _old_stem(request, folder).parent
    aligned = np.require(lengths, requirements="A")  # They are unaligned in the file, which is slow.

    def find() -> IndexMaps | None:
        return _find(request, folder, lambda maps: expected.fits(maps, aligned, bounds))

    cached = find()
    if cached is not None:
        return cached
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _one_builder(target):
            cached = find()
            return cached or _write(
                request, folder, names, index_maps.build(lengths, bounds, expected, request.random_seed)
            )
    except OSError as error:
        console.warn(f"index maps are not cached: {target}: {error.strerror}")
        return index_maps.build(lengths, bounds, expected, request.random_seed)


def _find(request: IndexRequest, folder: str | None, fits: Callable[[IndexMaps], bool]) -> IndexMaps | None:
    stem = _old_stem(request, folder)
    candidates = [[stem.with_name(f"{stem.name}_{part}.npy") for part in OLD_PARTS]]
    for description in sorted(_new_folder(request, folder).glob(f"*-GPTDataset-{request.index_split}-description.txt")):
        if _describes(description, request):
            base = description.name.removesuffix("description.txt")
            candidates.append([description.with_name(f"{base}{part}.npy") for part in NEW_PARTS])
    for paths in candidates:
        maps = _loaded(paths)
        if maps is not None and fits(maps):
            return maps
    return None


def _describes(path: Path, request: IndexRequest) -> bool:
    written = read_object(path)
    return all(written.get(key) == value for key, value in asdict(request).items())


def _loaded(paths: list[Path]) -> IndexMaps | None:
    try:
        return IndexMaps(*(np.load(path, mmap_mode="r", allow_pickle=False) for path in paths))
    except (OSError, ValueError, EOFError, SyntaxError, TokenError):  # The last two come from a damaged header.
        return None


def _write(request: IndexRequest, folder: str | None, names: Names, maps: IndexMaps) -> IndexMaps:
    arrays: tuple[npt.NDArray[Any], ...] = (maps.document_index, maps.sample_index, maps.shuffle_index)
    if names == "old":
        stem = _old_stem(request, folder)
        paths = [stem.with_name(f"{stem.name}_{part}.npy") for part in OLD_PARTS]
    else:
        description = request.description()
        base = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        cache = _new_folder(request, folder)
        paths = [cache / f"{base}-GPTDataset-{request.index_split}-{part}.npy" for part in NEW_PARTS]
        files.write_text(cache / f"{base}-GPTDataset-{request.index_split}-description.txt", description)
    for path, array in zip(paths, arrays, strict=True):
        with files.atomic_file(path, "wb", durable=False) as file:
            np.save(file, array, allow_pickle=False)
    return maps


@contextlib.contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Let one process of this host build at a time. If locks do not work, all processes build the same maps."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(files.locked(folder / ".steelyard-lock", wait=True))
        yield


def _new_folder(request: IndexRequest, folder: str | None) -> Path:
    return Path(folder) if folder else Path(request.dataset_path) / "cache" / "GPTDataset_indices"


def _old_stem(request: IndexRequest, folder: str | None) -> Path:
    prefix = Path(request.dataset_path)
    name = (
        f"{prefix.name}_{request.index_split}_indexmap_{request.num_samples}ns"
        f"_{request.sequence_length}sl_{request.random_seed}s"
    )
    return (Path(folder) if folder else prefix.parent) / name
