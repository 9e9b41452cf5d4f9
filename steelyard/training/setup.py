"""Setup before a run starts: check the recipe against these ranks, and open the data."""

from __future__ import annotations

import torch
import torch.distributed as dist

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.parallel.world import World, raise_on_all_ranks, run_on_rank0
from steelyard.sizes.least_recompute import with_least_recompute
from steelyard.sizes.rank_check import data_ranks
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens.samples import Samples, open_samples
from steelyard.training import device as devices
from steelyard.training.metrics import check_writers
from steelyard.training.profiler import refuse_absent


def refuse_unfit(recipe: Recipe, world: World) -> None:
    """Refuse recipes that these ranks cannot run, or that would fail only during training."""
    data_ranks(recipe, world.size)
    check_writers(recipe)
    refuse_absent(recipe, world.size)


def with_recompute(recipe: Recipe, world: World, device: torch.device) -> Recipe:
    """Replace `parallel.recompute = "auto"` by what fits on the GPU with the least memory."""
    usable = devices.usable_memory(device)
    if recipe.parallel.recompute != "auto":
        return recipe
    if usable is not None and world.size > 1:
        least = torch.tensor(usable, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        usable = int(least)
    chosen = with_least_recompute(recipe, world.size, usable)
    console.say(f"parallel.recompute = auto: {chosen.parallel.recompute}")
    return chosen


def open_data(recipe: Recipe, world: World) -> tuple[Samples, Samples | None]:
    """The training and validation samples. Rank 0 opens them first, so that index maps are built once."""

    def opened() -> tuple[Samples, Samples | None]:
        total = recipe.train.samples_in(recipe.train.steps)
        return open_samples(recipe, "train", total), _open_validation(recipe)

    if world.size == 1:
        return opened()

    def build_index_maps() -> None:
        opened()

    run_on_rank0(world, build_index_maps)
    was_quiet, console.quiet = console.quiet, True
    with raise_on_all_ranks(world):
        samples = opened()
    console.quiet = was_quiet
    return samples


def _open_validation(recipe: Recipe) -> Samples | None:
    wanted = recipe.eval.batches * recipe.train.global_batch
    try:
        return open_samples(recipe, "valid", wanted)
    except UserError as error:
        if recipe.data.valid:
            raise
        if not console.quiet:
            console.warn(f"no validation: {error.message}")
        return None


def end_of_document(recipe: Recipe) -> int | None:
    """The end-of-document token id, if the recipe needs it."""
    data = recipe.data
    if not (data.mask_documents or data.reset_positions):
        return None
    if data.end_of_document is not None:
        return data.end_of_document
    if data.tokenizer is None:
        raise UserError(
            "data.mask_documents and data.reset_positions need the end-of-document token, which is not set",
            where=recipe.where("data.mask_documents" if data.mask_documents else "data.reset_positions"),
            hint="set data.tokenizer or data.end_of_document",
        )
    return tokenizers.load_tokenizer(data.tokenizer).end_of_document
