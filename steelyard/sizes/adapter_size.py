"""Parameters and bytes of a layer with adapters, on one tensor-parallel rank.

LoRA's A (rank x in) and B (out x rank), and DoRA's magnitudes (out), are trained in fp32. The frozen matrices are
stored in the working precision or, with `finetune.base_precision`, quantized: `model/quantization.py` has the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.core.recipe.finetune_section import BasePrecision
from steelyard.sizes.param_count import matrices

BY_COLUMNS = ("output", "down")  # as in parallel/tensor_parallel.py
FP32 = 4


@dataclass(frozen=True)
class AdapterSize:
    """One layer of a recipe with adapters, on one rank. Its outputs are those of the matrices with an adapter."""

    parameters: int
    """Trained parameters."""
    matrix_bytes: int
    """Bytes of all frozen matrices."""
    product_bytes: int
    """Bytes of temporaries of a product: the dequantized matrix; for DoRA's norms, two matrices in fp32."""
    ranks: int
    """The widths of the adapters' inner products, summed."""
    outputs: int
    """The widths of the adapters' outputs, summed."""
    is_dora: bool


def adapter_size(recipe: Recipe, working_bytes: int) -> AdapterSize | None:
    """The sizes of a recipe with [finetune.adapter]."""
    tune, tensor = recipe.finetune, recipe.parallel.tensor
    if tune is None or tune.adapter is None:
        return None
    adapter, parameters, matrix_bytes, largest, outputs, ranks = tune.adapter, 0, 0.0, 0, 0, 0
    block = recipe.model.blocks.layers[0]
    for name, (rows, columns) in matrices(recipe.model).items():
        if name.rpartition(".")[2] in BY_COLUMNS:
            columns //= tensor
        else:
            rows //= tensor
        each = working_bytes if tune.stored is None else stored_bytes(tune.stored, columns)
        copies, uses = 1, 1  # matrices on this rank, and those that compute a token
        if isinstance(block.mlp, ExpertsBlock) and name.startswith("experts."):
            copies, uses = block.mlp.routing.experts // recipe.parallel.expert, block.mlp.routing.top_k
        matrix_bytes += each * rows * columns * copies
        largest = max(largest, rows * columns)
        place = "attention" if name in block.attention.matrices() else "mlp"
        if adapter.selects(f"{place}.{name}"):
            parameters += copies * (adapter.rank * (rows + columns) + (rows if adapter.kind == "dora" else 0))
            outputs += rows * uses
            ranks += adapter.rank * uses
    is_dora = adapter.kind == "dora"
    temporary = largest * ((0 if tune.stored is None else working_bytes) + (2 * FP32 if is_dora else 0))
    return AdapterSize(parameters, int(matrix_bytes), temporary, ranks, outputs, is_dora)


def stored_bytes(stored: BasePrecision, columns: int) -> float:
    """Bytes per weight of a quantized matrix: codes, and the largest magnitude of each block or row."""
    if stored.name == "int8":
        return 1 + FP32 / columns
    return 0.5 + ((1 + FP32 / 256) / 64 if stored.double_quant else FP32 / 64)
