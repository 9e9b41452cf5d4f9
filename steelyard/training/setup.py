"""What is done before a run begins: refuse what cannot run on these ranks, and open the data."""

from __future__ import annotations

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.parallel.world import World, raise_on_all_ranks, run_on_rank0
from steelyard.sizes.rank_check import data_ranks
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens.samples import Samples, open_samples
from steelyard.training.metrics import check_writers
from steelyard.training.profiler import refuse_absent


def refuse_unfit(recipe: Recipe, world: World) -> None:
    """Refuse what these ranks cannot run, and what would fail only once it is needed."""
    data_ranks(recipe, world.size)
    check_writers(recipe)
    refuse_absent(recipe, world.size)


def open_data(recipe: Recipe, world: World) -> tuple[Samples, Samples | None]:
    """The samples to train and validate on. The first rank looks first, so that index maps are made once."""

    def opened() -> tuple[Samples, Samples | None]:
        total = recipe.train.samples_in(recipe.train.steps)
        return open_samples(recipe, "train", total), _open_validation(recipe)

    if world.size == 1:
        return opened()

    def look() -> None:
        opened()

    run_on_rank0(world, look)
    console_was, console.quiet = console.quiet, True
    with raise_on_all_ranks(world):
        samples = opened()
    console.quiet = console_was
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
    """The id that ends a document, where the recipe needs to know."""
    data = recipe.data
    if not (data.mask_documents or data.reset_positions):
        return None
    if data.end_of_document is not None:
        return data.end_of_document
    if data.tokenizer is None:
        raise UserError(
            "to keep documents apart, their end must be known",
            where=recipe.where("data.mask_documents" if data.mask_documents else "data.reset_positions"),
            hint="set data.tokenizer or data.end_of_document",
        )
    return tokenizers.load_tokenizer(data.tokenizer).end_of_document
