"""The loss on the validation split during training, always on the same samples.

The samples are evaluated in short parts: progress is shown, and the ranks agree to stop between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from steelyard.core.console import console
from steelyard.core.recipe import Recipe
from steelyard.parallel.mesh import Mesh
from steelyard.tokens.dataloader import labels_in, read
from steelyard.tokens.samples import Samples
from steelyard.training.engine import Engine
from steelyard.training.graceful_stop import StopRequest


def validation_loss(engine: Engine, samples: Samples, stop: StopRequest) -> float | None:
    """The mean loss per token over `eval.batches` global batches; None if a rank was requested to stop."""
    recipe, mesh, loss_sum = engine.recipe, engine.mesh, 0.0
    number = recipe.eval.batches * recipe.train.global_batch
    with console.progress("validation", number, "samples") as progress, stop.during("batch of the validation"):
        for first, count in parts_of(recipe, mesh):
            if stop.agreed():
                return None
            loss_sum += engine.evaluate(read(samples, first, count)).item()
            progress.advance(count * mesh.data.size)
    return loss_sum / labels_in(samples, 0, number, recipe.data.sequence_length)


def parts_of(recipe: Recipe, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """First sample and number of samples of each part, for this rank.

    A part is two micro-batches, since DPO needs an even number of rows, or enough to fill a pipeline.
    """
    share = recipe.train.global_batch // mesh.data.size
    part = recipe.train.micro_batch * (2 if mesh.pipeline.size == 1 else 4 * mesh.pipeline.size)
    for batch in range(recipe.eval.batches):
        first = (batch * mesh.data.size + mesh.data.index) * share
        for start in range(0, share, part):
            yield first + start, min(part, share - start)


def check_patience(valid_losses: list[float], patience: int) -> tuple[bool, bool]:
    """Whether the last validation has the best loss so far, and whether `eval.patience` is exhausted.

    The validation before the first step does not count, since the run did not train those weights.
    """
    losses = [loss if math.isfinite(loss) else math.inf for loss in valid_losses]  # NaN is never the best.
    if not losses:
        return False, False
    since = len(losses) - 1 - losses.index(min(losses))
    out_of_patience = 0 < patience <= since
    if out_of_patience:
        console.say(f"early stop: the validation loss has not improved in {since} validations (eval.patience)")
    return since == 0 and losses[-1] < math.inf, out_of_patience
