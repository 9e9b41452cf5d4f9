"""Hugging Face folders: config.json, and weights as safetensors or .bin, in one file or in shards with an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats import hf_config as configs
from steelyard.checkpoint.formats import safe_unpickle, safetensors
from steelyard.checkpoint.formats.key_mapping import Entry, hugging_face
from steelyard.checkpoint.formats.mapped_tensors import MappedSource, Store
from steelyard.checkpoint.formats.source import TABLES
from steelyard.core.errors import CorruptFileError, UserError
from steelyard.core.files import inside
from steelyard.core.safe_parse import read_json_object

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
# Constants that older versions saved with the weights.
CONSTANTS = re.compile(r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def opened(path: Path) -> MappedSource | None:
    """The model in a folder, if it is a Hugging Face folder."""
    if path.is_file() and path.name in ("config.json", *WEIGHTS):
        path = path.parent
    if not (path / "config.json").is_file():
        return None
    hf = read_json_object(inside(path / "config.json"))
    config = configs.config_from_hf(hf, str(path / "config.json"))
    store = _store(path, config.tied)
    layout = {
        "files": len({place.path if isinstance(place, safetensors.Extent) else 0 for place in store.places.values()})
    }
    source = MappedSource("hf", path, config, store, hugging_face(config), layout)
    generation = path / "generation_config.json"
    source.hf_metadata = configs.metadata_of(hf, read_json_object(inside(generation)) if generation.is_file() else None)
    _check_vocab_rows(source)
    source.tokenizer_files = tokenizer_files(path)
    source.tokenizer = tokenizer_in(path)
    return source


def tokenizer_in(folder: Path) -> str | None:
    """The folder, if it contains a vocabulary and not only other tokenizer files."""
    return str(folder) if any((folder / name).is_file() for name in VOCABULARIES) else None


def _check_vocab_rows(source: MappedSource) -> None:
    """Raise unless embedding and head have `vocab_size` rows: that number includes padding, and no rows are removed."""
    sizes, vocab = source.store.sizes(), source.config.vocab
    for entry in source.entries:
        if entry.ours[0] in TABLES and (size := sizes.get(entry.name)) and size[0] != vocab:
            raise UserError(
                f"{entry.name} has {size[0]} rows, but vocab_size is {vocab}",
                where=str(source.path),
                hint="set vocab_size in config.json to the number of rows, or download the weights that belong to it",
            )


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer files in a folder."""
    return [inside(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()]


class _Folder(Store):
    """Tensors in safetensors files, or tensors mapped from .bin files."""

    def __init__(self, places: dict[str, safetensors.Extent | Tensor]) -> None:
        self.places = places

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: place.size if isinstance(place, safetensors.Extent) else tuple(place.shape)
            for name, place in self.places.items()
        }

    def dtypes(self) -> set[torch.dtype]:
        return {place.dtype for place in self.places.values()}

    def read(self, entry: Entry) -> Tensor:
        place = self.places[entry.name]
        return place.read() if isinstance(place, safetensors.Extent) else place


def _store(folder: Path, tied: bool) -> _Folder:
    places: dict[str, safetensors.Extent | Tensor] = {}
    for file, expected in _files(folder).items():
        found: dict[str, Any] = safetensors.extents(file) if file.suffix == ".safetensors" else _mapped(file)
        missing = expected - found.keys()
        if missing:
            raise CorruptFileError(f"{sorted(missing)[0]} is missing, but listed in the index", where=str(file))
        places.update(found)
    places = {name: place for name, place in places.items() if not CONSTANTS.search(name)}
    if any(name.startswith("h.0.") for name in places):  # The original release of GPT-2.
        places = {f"transformer.{name}": place for name, place in places.items()}
    if tied:
        places.pop("lm_head.weight", None)
    return _Folder(places)


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files with the weights, and the tensors that each has according to the index, if there is one."""
    name = next((name for name in WEIGHTS if (folder / name).is_file()), None)
    if name is None:
        raise UserError(f"{folder} has a config.json but no weights", hint=f"add one of {', '.join(WEIGHTS)}")
    if not name.endswith(".index.json"):
        return {inside(folder / name): set()}
    index = folder / name
    table = read_json_object(inside(index)).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UserError("it has no weight_map", where=str(index))
    files: dict[Path, set[str]] = {}
    for tensor, file in table.items():
        # A shard must be in the folder of its index.
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix not in (".safetensors", ".bin"):
            raise UserError(f"{tensor} is assigned to {file!r}, which is not a file of this folder", where=str(index))
        files.setdefault(folder / file, set()).add(tensor)
    for file in files:
        if not inside(file).is_file():
            raise CorruptFileError(f"the shard {file.name} is missing", where=str(index))
    return files


def _mapped(file: Path) -> dict[str, Tensor]:
    return safe_unpickle.tensors_in(safe_unpickle.load(file))
