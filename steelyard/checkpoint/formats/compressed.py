"""Compressed 2:4 weights: half of them, and two bits for each that say which half.

A folder with `config.json` and a tokenizer as Hugging Face has them, and `sparse.safetensors` (or, where it is large,
`sparse-00001-of-00007.safetensors` and so on) instead of `model.safetensors`, so that no other program takes it for
dense weights. Tensors have Steelyard's names. A matrix `layers.N.<...>.weight` of [out, in] that is compressed is two:

    layers.N.<...>.values     [out, in / 2], bf16, fp16 or fp32: of every four neighbours of a row the two that stay,
                              in their order
    layers.N.<...>.indices    [out, in / 8], U8: the place, 0 to 3, of each of those two, the first one's always the
                              lower; two bits each, those of a group of four the lower or the upper half of a byte, the
                              first of each pair the lower

That is 9/16 of the matrix in bf16. A group with more than two zeros has a zero among its values. Where in is an odd
multiple of four, a row of indices ends in half a byte of zeros. All other tensors are as they are. The metadata of each
file has `format` "steelyard-2:4" and `version` "1".
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from steelyard.checkpoint.formats import config as configs
from steelyard.checkpoint.formats import safetensors
from steelyard.checkpoint.formats.huggingface import read_json, tokenizer_files
from steelyard.checkpoint.formats.mapped import widest
from steelyard.checkpoint.formats.source import Source
from steelyard.core.errors import UserError

FORMAT, VERSION = "steelyard-2:4", "1"
VALUES, INDICES, WEIGHT = ".values", ".indices", ".weight"
AGAIN = "export or copy it again"


def opened(path: Path) -> CompressedSource | None:
    """The model of a folder, if it is a compressed one."""
    if path.is_file() and path.name.startswith("sparse"):
        path = path.parent
    files = sorted(path.glob("sparse*.safetensors")) if path.is_dir() else []
    if not files or not (path / "config.json").is_file():
        return None
    return CompressedSource(path, files)


class CompressedSource(Source):
    """Compressed weights, which come out dense, or, asked for as values and indices, as they lie there."""

    format = "compressed"

    def __init__(self, path: Path, files: list[Path]) -> None:
        config = read_json(path / "config.json")
        self.path, self.shape = path, configs.shape_of(config, str(path / "config.json"))
        self.places: dict[str, safetensors.Extent] = {}
        for file in files:
            about = safetensors.metadata(file)
            if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
                raise UserError("this is no file of compressed 2:4 weights", where=str(file), mend=AGAIN)
            self.places |= safetensors.extents(file)
        self.compressed = [name.removesuffix(VALUES) + WEIGHT for name in self.places if name.endswith(VALUES)]
        for name in self.compressed:
            self._check(name)
        floats = {place.dtype for name, place in self.places.items() if not name.endswith(INDICES)}
        self.dtype = widest(floats, path)
        self.layout = {"files": len(files), "compressed": len(self.compressed)}
        self.extra = {key: config[key] for key in configs.SPECIAL if config.get(key) is not None}
        if config.get("max_position_embeddings"):
            self.extra["positions"] = config["max_position_embeddings"]
        if (path / "generation_config.json").is_file():
            self.extra["generation_config"] = read_json(path / "generation_config.json")
        self.tokenizer_files = tokenizer_files(path)
        self.tokenizer = str(path) if self.tokenizer_files else None

    def _check(self, name: str) -> None:
        values, indices = (self.places.get(part) for part in parts_of(name))
        fits = values is not None and indices is not None and len(values.size) == 2
        if not fits or indices.size != (values.size[0], -(-values.size[1] // 4)) or indices.dtype != torch.uint8:  # type: ignore[union-attr]
            raise UserError(f"the indices of {name} do not fit its values", where=str(self.path), mend=AGAIN)

    def names(self) -> list[str]:
        dense = [name for name in self.places if not name.endswith((VALUES, INDICES))]
        return dense + self.compressed

    def sizes(self) -> dict[str, tuple[int, ...]]:
        sizes = {name: self.places[name].size for name in self.places if not name.endswith((VALUES, INDICES))}
        for name in self.compressed:
            rows, kept = self.places[parts_of(name)[0]].size
            sizes[name] = (rows, 2 * kept)
        return sizes

    def tensor(self, name: str) -> Tensor:
        if name in self.places:
            return self.places[name].read()
        values, indices = (self.places[part].read() for part in parts_of(name))
        return expanded(values, indices, f"{self.path}: {name}")


def parts_of(name: str) -> tuple[str, str]:
    """The names of a compressed matrix's values and indices."""
    stem = name.removesuffix(WEIGHT)
    return stem + VALUES, stem + INDICES


def places_of(indices: Tensor, groups: int) -> Tensor:
    """The places of the two weights of each group, (out, groups, 2), as whole numbers."""
    halves = torch.stack([indices & 15, indices >> 4], dim=-1).flatten(1)[:, :groups]
    return torch.stack([halves & 3, halves >> 2], dim=-1)


def expanded(values: Tensor, indices: Tensor, where: str = "") -> Tensor:
    """The matrix with its zeros."""
    groups = values.shape[1] // 2
    places = places_of(indices, groups)
    if not bool((places[..., 0] < places[..., 1]).all()):
        raise UserError("its indices are not in order", where=where, mend=AGAIN)
    whole = values.new_zeros(values.shape[0], groups, 4)
    return whole.scatter_(2, places.long(), values.unflatten(1, (groups, 2))).flatten(1)
