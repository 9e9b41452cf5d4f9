"""Compressed 2:4 weights: half of the values, and two bits of index for each.

The format is a folder with `config.json` and a tokenizer as in Hugging Face, and `sparse.safetensors` (if it is large,
`sparse-00001-of-00007.safetensors` and so on) instead of `model.safetensors`, so that no other program reads it as
dense weights. Tensors have Steelyard's names. A compressed matrix `layers.N.<...>.weight` of [out, in] is two tensors:

    layers.N.<...>.values     [out, in / 2], bf16, fp16 or fp32: the two values that are kept of every four neighbours
                              in a row, in their order
    layers.N.<...>.indices    [out, in / 8], U8: the index, 0 to 3, of each of these two in its group, in ascending
                              order; two bits each, the first one in the lower bits; a group of four takes the lower or
                              the upper half of a byte, the first group the lower

This is 9/16 of the size of the matrix in bf16. A group with more than two zeros has a zero among its values. If `in` is
an odd multiple of four, a row of indices ends with half a byte of zeros. The weight of experts is [experts, out, in],
and its values and indices have the same first dimension. All other tensors are stored unchanged. The
metadata of each file has `format` "steelyard-2:4" and `version` "1".

Version "2" has values of 8 bits, and a third tensor for each matrix; its metadata also has `values`, "fp8" or "int8":

    layers.N.<...>.values     [out, in / 2], F8_E4M3 or I8: each weight divided by the scale of its row
    layers.N.<...>.scales     [out], F32 (`row_scales.py`)

This is 5/16 of the size of the matrix in bf16. `sparse_format` in config.json repeats the metadata.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.finite import refuse_nonfinite
from steelyard.checkpoint.formats import hf_config as configs
from steelyard.checkpoint.formats import safetensors
from steelyard.checkpoint.formats.huggingface import tokenizer_files
from steelyard.checkpoint.formats.mapped_tensors import widest
from steelyard.checkpoint.formats.row_scales import DTYPES, ValueFormat, dequantized
from steelyard.checkpoint.formats.source import TABLES, CheckpointSource, padded
from steelyard.core.errors import UserError
from steelyard.core.files import inside
from steelyard.core.safe_parse import read_json_object

FORMAT, VERSION, VERSION_8_BIT = "steelyard-2:4", "1", "2"
STATED = "sparse_format"  # in config.json
VALUES, INDICES, SCALES, WEIGHT = ".values", ".indices", ".scales", ".weight"
PARTS = (VALUES, INDICES, SCALES)
GROUP, NONZEROS = 4, 2
AGAIN = "export or copy it again"


def declaration(kind: ValueFormat | None) -> dict[str, str]:
    """What the metadata of each file and config.json say about the format."""
    return {"format": FORMAT, "version": VERSION} if kind is None else {
        "format": FORMAT, "version": VERSION_8_BIT, "values": kind
    }  # fmt: skip


def declared(about: Mapping[str, Any], where: Path) -> ValueFormat | None:
    """The format of the values of a file, from its metadata."""
    if about.get("format") != FORMAT:
        raise UserError("this is not a file of compressed 2:4 weights", where=str(where), hint=AGAIN)
    if about.get("version") == VERSION:
        return None
    if about.get("version") != VERSION_8_BIT:
        raise UserError(
            f"version {about.get('version')} of compressed 2:4 weights is not supported",
            where=str(where),
            hint=f"supported are {VERSION} and {VERSION_8_BIT}; update Steelyard",
        )
    for kind in DTYPES:
        if about.get("values") == kind:
            return kind
    raise UserError(
        f"compressed 2:4 weights with {about.get('values')} values are not supported",
        where=str(where),
        hint=f"supported are {', '.join(DTYPES)}; update Steelyard",
    )


def opened(path: Path) -> CompressedSource | None:
    """The model in a folder, if it is compressed."""
    if path.is_file() and path.name.startswith("sparse"):
        path = path.parent
    files = sorted(map(inside, path.glob("sparse*.safetensors"))) if path.is_dir() else []
    if not files or not (path / "config.json").is_file():
        return None
    return CompressedSource(path, files)


class CompressedSource(CheckpointSource):
    """Compressed weights, returned dense, or unchanged under the names of values and indices."""

    format = "compressed"

    def __init__(self, path: Path, files: list[Path]) -> None:
        hf = read_json_object(inside(path / "config.json"))
        stated = hf.pop(STATED, None)
        self.path, self.config = path, configs.config_from_hf(hf, str(path / "config.json"))
        self.places: dict[str, safetensors.Extent] = {}
        kinds = [declared(safetensors.metadata(file), file) for file in files]
        self.value_format = kinds[0]
        if any(kind != self.value_format for kind in kinds) or stated not in (None, declaration(self.value_format)):
            raise UserError(
                f"the files and {STATED} in config.json declare different formats", where=str(path), hint=AGAIN
            )
        for file in files:
            self.places |= safetensors.extents(file)
        self.compressed = [name.removesuffix(VALUES) + WEIGHT for name in self.places if name.endswith(VALUES)]
        for name in self.compressed:
            self._check(name)
        not_floats = (INDICES,) if self.value_format is None else PARTS
        floats = {place.dtype for name, place in self.places.items() if not name.endswith(not_floats)}
        self.dtype = widest(floats, path)
        self.layout = {"files": len(files), "compressed": len(self.compressed)}
        generation = path / "generation_config.json"
        self.hf_metadata = configs.metadata_of(
            hf, read_json_object(inside(generation)) if generation.is_file() else None
        )
        self.tokenizer_files = tokenizer_files(path)
        self.tokenizer = str(path) if self.tokenizer_files else None

    def _check(self, name: str) -> None:
        values, indices = (self.places.get(part) for part in parts_of(name))
        if values is None or indices is None or len(values.size) not in (2, 3) or indices.dtype != torch.uint8:
            fits = False
        else:
            *rows, kept = values.size
            fits = kept % NONZEROS == 0 and indices.size == (*rows, indices_of_row(2 * kept))
        if not fits:
            raise UserError(f"the indices of {name} do not fit its values", where=str(self.path), hint=AGAIN)
        scales = self.places.get(scales_of(name))
        if self.value_format is None:
            fits = scales is None
        else:
            assert values is not None
            fits = scales is not None and (scales.dtype, scales.size) == (torch.float32, values.size[:-1])
            fits = fits and values.dtype == DTYPES[self.value_format]
        if not fits:
            raise UserError(
                f"the values and scales of {name} are not those of {self.value_format or 'unscaled'} values",
                where=str(self.path),
                hint=AGAIN,
            )

    def names(self) -> list[str]:
        dense = [name for name in self.places if not name.endswith(PARTS)]
        return dense + self.compressed

    def sizes(self) -> dict[str, tuple[int, ...]]:
        sizes = {name: self.places[name].size for name in self.places if not name.endswith(PARTS)}
        for name in self.compressed:
            *rows, kept = self.places[parts_of(name)[0]].size
            sizes[name] = (*rows, 2 * kept)
        return sizes

    def tensor(self, name: str) -> Tensor:
        if name in self.places:
            whole = self.places[name].read()
            refuse_nonfinite({name: whole.float() if whole.dtype == torch.float8_e4m3fn else whole}, self.path)
            return padded(whole, self.config) if name in TABLES else whole
        values, indices = (self.places[part].read() for part in parts_of(name))
        if self.value_format is not None:
            values = dequantized(values, self.places[scales_of(name)].read())
        refuse_nonfinite({name: values}, self.path)
        return expanded(values, indices, f"{self.path}: {name}")


def parts_of(name: str) -> tuple[str, str]:
    """The names of a compressed matrix's values and indices."""
    stem = name.removesuffix(WEIGHT)
    return stem + VALUES, stem + INDICES


def scales_of(name: str) -> str:
    """The name of a compressed matrix's scales."""
    return name.removesuffix(WEIGHT) + SCALES


def codes_of(indices: Tensor, groups: int) -> Tensor:
    """The two indices of each group, (out, groups), as four bits."""
    return torch.stack([indices & 15, indices >> 4], dim=-1).flatten(-2)[..., :groups]


def masks_of(indices: Tensor, groups: int) -> Tensor:
    """The mask of each group, (out, groups), as four bits: the first weight is the lowest bit."""
    return MASK_OF_CODE.to(indices.device)[codes_of(indices, groups).int()]


def expanded(values: Tensor, indices: Tensor, where: str = "") -> Tensor:
    """The dense matrix."""
    groups = values.shape[-1] // NONZEROS
    masks = masks_of(indices, groups)
    if not bool(masks.all()):
        raise UserError("the indices are not in ascending order", where=where, hint=AGAIN)
    whole = values.new_zeros(*values.shape[:-1], groups, GROUP)
    whole[_members(masks)] = values.flatten()
    return whole.flatten(-2)


def matrices(sizes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights of a model that can be compressed: the matrices of its layers, except routers."""
    return [
        name
        for name, size in sizes.items()
        if name.startswith("layers.") and len(size) > 1 and not name.endswith(".router.weight")
    ]


def indices_of_row(inputs: int) -> int:
    """The number of bytes of the indices of a row."""
    return -(-inputs // (2 * GROUP))


def crowded(weight: Tensor) -> str | None:
    """Why a matrix is not 2:4, if it is not."""
    if weight.shape[-1] % GROUP:
        return f"it has {weight.shape[-1]} inputs, which is not a multiple of {GROUP}"
    kept = weight.unflatten(-1, (-1, GROUP)).count_nonzero(-1)
    too_many = int((kept > NONZEROS).sum())
    return f"{too_many} of its {kept.numel()} groups of four have more than two nonzero weights" if too_many else None


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The values and indices of a 2:4 matrix, or of all experts."""
    indices = indices_of(weight)
    return values_at(weight, indices), indices


def values_at(weight: Tensor, indices: Tensor) -> Tensor:
    """The values of a matrix at the indices of each group."""
    groups = weight.unflatten(-1, (-1, GROUP))
    values: Tensor = groups[_members(masks_of(indices, groups.shape[-2]))]
    return values.view(*weight.shape[:-1], -1)


def indices_of(weight: Tensor) -> Tensor:
    """The indices of a 2:4 matrix, or of all experts."""
    groups = weight.unflatten(-1, (-1, GROUP))
    filled = (groups != 0).to(torch.uint8)
    bits = filled[..., 0] | filled[..., 1] << 1 | filled[..., 2] << 2 | filled[..., 3] << 3
    codes = CODE_OF_FILLED.to(weight.device)[bits.int()]
    if codes.shape[-1] % 2:
        codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], 1)], dim=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _members(masks: Tensor) -> Tensor:
    return torch.stack([masks & 1 << place != 0 for place in range(GROUP)], dim=-1)


def _tables() -> tuple[Tensor, Tensor]:
    """The mask of each code (a pair of indices), 0 if it is invalid, and the code for each set of nonzero weights.

    A group with fewer than two nonzero weights also stores its first zeros.
    """
    masks, codes = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    for first, second in itertools.combinations(range(GROUP), NONZEROS):
        masks[first + 4 * second] = (1 << first) + (1 << second)
    for filled in range(16):
        ordered = sorted(range(GROUP), key=lambda place, filled=filled: (not filled >> place & 1, place))  # type: ignore[misc]
        first, second = sorted(ordered[:NONZEROS])
        codes[filled] = first + 4 * second
    return masks, codes


MASK_OF_CODE, CODE_OF_FILLED = _tables()
