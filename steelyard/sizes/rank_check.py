"""Whether the layout and the batch of a recipe divide over a number of ranks."""

from __future__ import annotations

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe


def data_ranks(recipe: Recipe, world: int) -> int:
    """The data-parallel degree on `world` ranks. Raises `UserError` if the recipe cannot run on them."""
    parallel, train = recipe.parallel, recipe.train
    data = parallel.data_for(world)
    if data % parallel.replicate:
        raise UserError(
            f"{data} data-parallel ranks do not form {parallel.replicate} equal groups",
            where=recipe.where("parallel.replicate"),
            hint=f"choose a divisor of {data}",
        )
    _refuse_experts(recipe, data)
    ramp, per_step = train.batch_ramp, train.micro_batch * data
    sizes = range(ramp.start, train.global_batch, ramp.increment) if ramp else ()
    for size in (*sizes, train.global_batch):
        if size % per_step:
            raise UserError(
                f"a batch of {size} does not divide into micro-batches of {train.micro_batch} on {data} "
                "data-parallel ranks",
                where=recipe.where("train.global_batch"),
                hint=f"choose a multiple of {per_step}, or another number of ranks",
            )
        _refuse_schedule(recipe, size // per_step)
    return data


def _refuse_experts(recipe: Recipe, data: int) -> None:
    """Raise `UserError` if the expert axis does not divide the ranks that it is a part of."""
    parallel = recipe.parallel
    ranks = data * parallel.context // (parallel.replicate if parallel.zero else 1)
    if ranks % parallel.expert:
        raise UserError(
            f"parallel.expert = {parallel.expert} does not divide the {ranks} ranks that share the data",
            where=recipe.where("parallel.expert"),
            hint="choose a divisor of data x context / replicate, or another number of ranks",
        )


def _refuse_schedule(recipe: Recipe, micro_batches: int) -> None:
    """Raise `UserError` if the pipeline schedule cannot run this number of micro-batches."""
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
        f"{parallel.schedule} on {parallel.pipeline} pipeline ranks needs {wanted} per step",
        where=recipe.where("train.global_batch"),
        hint="choose another train.global_batch or train.micro_batch, or the schedule gpipe",
    )
