"""2:4 semi-structured matrices: their compressed form in GPU memory, and detection in any checkpoint.

`checkpoint.formats.compressed_tensors` describes the file layout, `sparse_gemv.py` the memory layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, SourceView, row_scales
from steelyard.checkpoint.formats.compressed_tensors import (
    INDICES,
    NONZEROS,
    PARTS,
    SCALES,
    VALUES,
    WEIGHT,
    CompressedSource,
    compress,
    crowded,
    masks_of,
    matrices,
    values_at,
)
from steelyard.checkpoint.formats.row_scales import ValueFormat, dequantized
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.sparsity.calibration import Calibration, Windows, windows_of
from steelyard.sparsity.layerwise import CPU, LayerOnDevice, Task, pruned_layers
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.pruned_source import PartlyPrunedSource
from steelyard.training.device import dtype_for

BLOCK_WORDS, BLOCK_GROUPS = 16, 128
TILE = 16  # matrix rows of one sparse tensor-core instruction
SHOWN = 10
PATTERN = Pattern.parse("2:4")


@dataclass(frozen=True)
class Packed:
    """A matrix in GPU memory: two weights per group, and each group's mask, in the layout of `sparse_gemv`."""

    values: Tensor
    """(outputs, 2 * groups), 16-bit floats, or fp8 or int8 with scales."""
    words: Tensor
    """(outputs, words of a row), int32."""
    metadata: Tensor | None = None
    """The metadata for `sparse_mma` (see `metadata_of`); None unless the matrix consists of whole tiles and blocks."""
    scales: Tensor | None = None
    """(outputs,), fp32: each row of 8-bit values is multiplied by one."""

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return self.values.shape[0]

    @property
    def groups(self) -> int:
        """Groups of four inputs in a row."""
        return self.values.shape[1] // NONZEROS


def packed(values: Tensor, indices: Tensor, scales: Tensor | None = None) -> Packed:
    """A compressed matrix in the layout of the GPU kernels."""
    groups = values.shape[1] // NONZEROS
    masks = masks_of(indices, groups)
    blocks = -(-groups // BLOCK_GROUPS)
    filled = torch.zeros(len(masks), blocks * BLOCK_GROUPS, dtype=torch.int32, device=masks.device)
    filled[:, :groups] = masks  # four bits per number for now
    steps = filled.unflatten(1, (blocks, 8, BLOCK_WORDS))
    words = torch.zeros(len(masks), blocks, BLOCK_WORDS, dtype=torch.int32, device=masks.device)
    for step in range(8):
        words |= steps[:, :, step] << 4 * step
    metadata = None
    if len(masks) % TILE == 0 and groups % BLOCK_GROUPS == 0:
        # The slots of 8-bit values: see `sparse_mma.py`.
        in_slots = masks if scales is None else masks.unflatten(1, (-1, 4, 2, 4)).transpose(2, 3).flatten(1)
        metadata = metadata_of(in_slots)
    return Packed(values.contiguous(), words.flatten(1), metadata, scales)


def metadata_of(masks: Tensor) -> Tensor:
    """The positions of each group's two weights, from its mask (outputs, groups), as the metadata of `mma.sp`.

    Group 32 t + 4 s + i is in slot s. For each tile of rows and each block a thread has eight words, in two times four:
    (tiles, blocks, 2, 32, 4), int32.
    """
    first, second, third, fourth = (masks.int() >> place & 1 for place in range(4))
    lower, upper = (1 - first) * (2 - second), 2 * (third | fourth) | (fourth | (1 - third))
    tiles, blocks = len(masks) // TILE, masks.shape[1] // BLOCK_GROUPS
    # Rows: tile, half, g. Groups: block, t, parity of q, slot, upper and lower half of i; the latter is q < 2 or not.
    parts = (lower | upper << 2).view(tiles, 2, 8, blocks, 4, 2, 4, 2, 2)
    shifts = torch.tensor([[0, 4, 8, 12], [16, 20, 24, 28]], dtype=torch.int32, device=masks.device)
    words = (parts << shifts.view(1, 2, 1, 1, 1, 1, 4, 1, 1)).sum((1, 6), dtype=torch.int32)
    # The rest: tile, g, block, t, parity, and i's halves; a thread is (g, lower, parity), its words (t's half, upper).
    split = words.view(tiles, 8, blocks, 2, 2, 2, 2, 2)
    return split.permute(0, 2, 3, 1, 7, 5, 4, 6).contiguous().view(tiles, blocks, 2, 32, 4)


def dense(held: Packed) -> Tensor:
    """The dense matrix, from the layout of the GPU kernels; 8-bit values become fp32."""
    blocks = held.words.unflatten(1, (-1, 1, BLOCK_WORDS))
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=held.words.device)[:, None]
    masks = (blocks >> shifts).flatten(1)[:, : held.groups]
    members = (masks[..., None] >> torch.arange(4, dtype=torch.int32, device=masks.device) & 1).bool()
    values = held.values if held.scales is None else dequantized(held.values, held.scales)
    whole = values.new_zeros(held.outputs, held.groups, 4)
    whole[members] = values.flatten()
    return whole.flatten(1)


class CompressedView(SourceView):
    """A view of a checkpoint that compresses its 2:4 matrices, with the interface of `CompressedSource`."""

    def __init__(
        self, source: CheckpointSource, compressed: list[str], value_format: ValueFormat | None = None
    ) -> None:
        super().__init__(source)
        self.compressed, self.value_format = compressed, value_format
        self.calibrated: CheckpointSource | None = None
        """Its matrices with the weights that 8-bit values represent; None rounds each weight to the nearest one."""
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def tensor(self, name: str) -> Tensor:
        """A tensor of the source, or the values, indices or scales of one of its matrices."""
        if not name.endswith(PARTS):
            return super().tensor(name)
        stem, _, part = name.rpartition(".")
        if self._last is None or self._last[0] != stem:  # All parts are read, one after the other.
            calibrated = None if self.calibrated is None else self.calibrated.tensor(stem + WEIGHT)
            self._last = stem, compressed_parts(super().tensor(stem + WEIGHT), self.value_format, calibrated)
        return self._last[1]["." + part]


def compressed_parts(
    weight: Tensor, value_format: ValueFormat | None, calibrated: Tensor | None = None
) -> dict[str, Tensor]:
    """A compressed matrix by the ends of the names of its tensors; `calibrated` as in `CompressedView`."""
    values, indices = compress(weight)
    if value_format is None:
        return {VALUES: values, INDICES: indices}
    scales = row_scales.scales_of(values, value_format)
    held = values.float() if calibrated is None else values_at(calibrated, indices)
    return {VALUES: row_scales.nearest(held / scales[..., None], value_format), INDICES: indices, SCALES: scales}


def compressible(
    source: CheckpointSource, allow_dense: bool, value_format: ValueFormat | None = None
) -> CompressedSource | CompressedView:
    """A checkpoint with the list of its 2:4 matrices. Without `allow_dense`, other matrices raise an error."""
    if isinstance(source, CompressedSource):
        is_same = source.value_format == value_format
        return source if is_same else CompressedView(source, source.compressed, value_format)
    names = matrices(source.sizes())
    sparse: list[tuple[str, str | None]] = []
    others: list[tuple[str, str | None]] = []
    with console.progress("checking for 2:4", len(names), "matrices") as progress:
        for name in names:
            reason = crowded(source.tensor(name))
            (sparse if reason is None else others).append((name, reason))
            progress.advance(1)
    if not sparse or (others and not allow_dense):
        listed = [f"{name}: {reason}" for name, reason in others[:SHOWN]]
        more = [f"and {len(others) - SHOWN} more"] if len(others) > SHOWN else []
        raise UserError(
            f"{source.path} has matrices that do not follow 2:4:\n  " + "\n  ".join(listed + more),
            hint="prune it (steelyard prune --pattern 2:4) or give a mask file with --mask; "
            "--allow-dense keeps other matrices dense",
        )
    return CompressedView(source, [name for name, _ in sparse], value_format)


def export(
    source: CheckpointSource,
    destination: Path,
    dtype: torch.dtype | None,
    allow_dense: bool,
    tokenizer: str | None = None,
    value_format: ValueFormat | None = None,
    calibration: Calibration | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Write a 2:4 checkpoint in compressed form; returns the report.

    With `calibration`, 8-bit values are chosen for the output of each matrix on this data, computed on `device`.
    """
    tokens = None
    if calibration is not None:
        if isinstance(source, CompressedSource) and source.value_format == value_format:
            raise UserError(
                f"{source.path} already has {value_format} values",
                where="--calibration",
                hint="give the checkpoint that it was exported from",
            )
        tokens = windows_of(source, calibration, tokenizer)
    view = compressible(source, allow_dense, value_format)
    if tokens is not None:
        assert value_format is not None, "only 8-bit values are calibrated"
        assert isinstance(view, CompressedView), "this format was refused above"
        console.say(f"calibrating with {tokens.described}")
        view.calibrated = PartlyPrunedSource(source, _calibrated(view, tokens, value_format, device), view.compressed)
    if dtype is None:
        dtype = source.dtype if source.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    if dtype.itemsize < source.dtype.itemsize:
        console.say(f"weights are rounded from {_name(source.dtype)} to {_name(dtype)}")
    result = convert(view, destination, Target("compressed", dtype=dtype, tokenizer=tokenizer))
    sizes = source.sizes()
    return result | {
        "values": value_format or _name(dtype),
        "calibration": None if tokens is None else tokens.described,
        "compressed": len(view.compressed),
        "dense_matrices": len(matrices(sizes)) - len(view.compressed),
        "bytes": sum(file.stat().st_size for file in destination.glob("sparse*.safetensors")),
    }


def _calibrated(
    view: CompressedView, tokens: Windows, value_format: ValueFormat, device: torch.device
) -> Iterator[LayerOnDevice]:
    """The layers with the weights that 8-bit values represent."""
    dtype = dtype_for("auto", view.origin, device)
    task = Task("magnitude", PATTERN, view.compressed, device=device, dtype=dtype, value_format=value_format)
    for layer in pruned_layers(view.origin, task, tokens.tokens_BL):
        error = layer.error()
        shown = "unknown" if error is None else f"{error:.6f}"
        console.say(f"layer {layer.number:3d}  error {shown}  {layer.seconds:.2f} s")
        yield layer


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
