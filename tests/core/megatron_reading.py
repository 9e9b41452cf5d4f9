"""Reads scripts and flags in tests."""

from pathlib import Path

from steelyard.core.recipe import Recipe, load_recipe
from steelyard.megatron import ImportResult, read

SMALL = "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
MOE = LLAMA + "--num-experts 8 "


def meant(*scripts: str, arguments: tuple[str, ...] = (), **options) -> tuple[Recipe, ImportResult]:
    """The recipe that scripts mean, loaded as any other, and the reading."""
    reading = read([Path(script) for script in scripts], arguments, **options)
    assert reading.recipe is not None
    Path("recipe.toml").write_text(reading.recipe)
    return load_recipe("recipe.toml"), reading


def of_flags(flags: str, **options) -> tuple[Recipe, ImportResult]:
    Path("flags.sh").write_text(f"torchrun --nproc_per_node 8 {SMALL}{flags}\n")
    return meant("flags.sh", **options)


def left(reading: ImportResult) -> dict[str, str]:
    return {entry.flag: entry.reason for entry in reading.left}
