"""What is done before a run begins: refuse what cannot run on these ranks, and open the data."""

from __future__ import annotations

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.parallel.world import World, alike, everywhere
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens.samples import Samples, open_samples
from steelyard.train.metrics import check_writers


def refuse_unfit(recipe: Recipe, world: World) -> None:
    """Refuse what this number of ranks cannot run."""
    data = recipe.parallel.data_for(world.size)
    per_step = recipe.train.micro_batch * data
    ramp = recipe.train.ramp_up
    for size in (recipe.train.global_batch, *((ramp.start, ramp.increment) if ramp else ())):
        if size % per_step:
            raise UserError(
                f"a batch of {size} does not divide into micro-batches of {recipe.train.micro_batch} on {data} "
                "data-parallel ranks",
                where=recipe.where("train.global_batch"),
                mend=f"choose a multiple of {per_step}, or other sizes in [parallel]",
            )
    sizes = range(ramp.start, recipe.train.global_batch, ramp.increment) if ramp else ()
    for size in (*sizes, recipe.train.global_batch):
        _refuse_schedule(recipe, size // per_step)
    check_writers(recipe)


def _refuse_schedule(recipe: Recipe, micro_batches: int) -> None:
    """Refuse a number of micro-batches that the pipeline's schedule cannot run."""
    parallel = recipe.parallel
    rounds = max(1, micro_batches // parallel.pipeline)
    if parallel.pipeline == 1 or parallel.schedule == "gpipe":
        return
    if parallel.schedule == "1f1b" and micro_batches < parallel.pipeline:
        wanted = f"at least {parallel.pipeline} micro-batches, not {micro_batches}"
    elif parallel.schedule != "1f1b" and micro_batches % rounds:
        wanted = f"a multiple of {rounds} micro-batches, not {micro_batches}"
    else:
        return
    raise UserError(
        f"{parallel.schedule} on {parallel.pipeline} pipeline ranks takes {wanted} in a step",
        where=recipe.where("train.global_batch"),
        mend="choose another train.global_batch or train.micro_batch, or the schedule gpipe",
    )


def open_data(recipe: Recipe, world: World) -> tuple[Samples, Samples | None]:
    """The samples to train and validate on. The first rank looks first, so that index maps are made once."""

    def opened() -> tuple[Samples, Samples | None]:
        total = recipe.train.samples_in(recipe.train.steps)
        return open_samples(recipe, "train", total), _open_validation(recipe)

    if world.size == 1:
        return opened()

    def look() -> None:
        opened()

    everywhere(world, look)
    console_was, console.quiet = console.quiet, True
    with alike(world):
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
            mend="set data.tokenizer or data.end_of_document",
        )
    return tokenizers.load(data.tokenizer).end_of_document
