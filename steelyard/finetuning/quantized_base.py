"""The quantized base of QLoRA.

Each matrix is read, quantized on the device and released before the next, so that a device never holds more than one
of them in full. Every rank quantizes whole matrices and keeps its shards, so all layouts train on the same weights, and
checkpoints need not contain them: a resumed run quantizes the same base again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, SourceView
from steelyard.core.recipe.finetune_section import BasePrecision
from steelyard.model.quantization import ShardExtent, dequantize, quantize, shard_of
from steelyard.model.quantized_weight import QuantizedWeight
from steelyard.parallel.tensor_parallel import MAGNITUDE
from steelyard.training.engine import Engine

MATRIX = "weight"  # the name of a matrix in its module


@torch.no_grad()
def load_quantized(source: CheckpointSource, engine: Engine, stored: BasePrecision, sets_magnitudes: bool) -> None:
    """Fill the quantized matrices of this rank, and on demand DoRA's magnitudes with the norms of their rows."""
    shards_by_name = {shard.name: shard for shard in engine.param_shards}
    for stage in engine.parallel_model.stages.values():
        for path, weight in stage.named_modules():
            if not isinstance(weight, QuantizedWeight):
                continue
            quantized = quantize(source.tensor(path).to(engine.device), *stored)
            for name, values in shard_of(quantized, weight.extent)._asdict().items():
                if values is not None:
                    shard = shards_by_name[f"{path}.{name}"]
                    shard.tensor.copy_(values[shard.rows.start : shard.rows.stop].view(shard.tensor.dtype))
            magnitude = shards_by_name.get(path.removesuffix(MATRIX) + MAGNITUDE)
            if sets_magnitudes and magnitude is not None:
                whole = ShardExtent(0, 0, weight.whole_rows, weight.extent.whole_columns, weight.extent.whole_columns)
                norms = dequantize(shard_of(quantized, whole), whole, torch.float32).norm(dim=1)
                magnitude.tensor.copy_(norms[magnitude.rows.start : magnitude.rows.stop])


class QuantizedSource(SourceView):
    """A base whose matrices have the values that the layers of a QLoRA run compute with."""

    def __init__(self, origin: CheckpointSource, stored: BasePrecision) -> None:
        super().__init__(origin)
        self.stored, self.dtype = stored, torch.float32

    def tensor(self, name: str) -> Tensor:
        """A tensor of the base; a matrix of a layer quantized and dequantized."""
        whole = super().tensor(name)
        if not name.startswith("layers.") or whole.ndim != 2:
            return whole
        rows, columns = whole.shape
        extent = ShardExtent(0, 0, rows, columns, columns)
        return dequantize(shard_of(quantize(whole, *self.stored), extent), extent, torch.float32)
