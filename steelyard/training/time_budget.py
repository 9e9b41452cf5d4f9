"""The number of steps that fit into a given time on this machine, from the measured time of a few steps."""

from __future__ import annotations

import statistics
import time

from steelyard.core.recipe import Recipe
from steelyard.parallel import mesh as meshes
from steelyard.parallel.world import World
from steelyard.tokens.dataloader import labels_in, read
from steelyard.training import device as devices
from steelyard.training import setup
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

WARM_UP_STEPS = 2  # The first steps allocate memory and optimizer state.
TIMED_STEPS = 5
LONGEST = 10.0  # seconds; a slow machine is measured well enough by fewer steps
FORWARD_SHARE = 1 / 3  # of a step's time: the backward pass takes twice as long as the forward pass


def seconds_per_step(recipe: Recipe) -> float:
    """The median time of a recipe's first steps in this process. Their results are discarded.

    Layers are not compiled here: compiling takes longer than the steps, and the run would compile again.
    """
    device, batch, length = devices.choose(recipe), recipe.train.global_batch, recipe.data.sequence_length
    plain = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})})
    samples, _ = setup.open_data(plain, World())
    engine = Engine(plain, meshes.alone(), device, Extension(), setup.end_of_document(plain))
    engine.initialise()
    seconds: list[float] = []
    while len(seconds) < WARM_UP_STEPS + TIMED_STEPS and sum(seconds) < LONGEST:
        first = len(seconds) * batch
        begun = time.perf_counter()
        rows, labels = read(samples, first, batch), labels_in(samples, first, batch, length)
        loss, _, _ = engine.step(rows, first, plain.optim.learning_rate, labels, 1.0)
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def steps_within(seconds: float, per_step: float, recipe: Recipe, fewest: int, most: int) -> int:
    """The number of steps that take `seconds` with the recipe's validations, rounded down to tens, in [fewest, most].

    Validation runs before the first step, after the last, and every `eval.every` steps.
    """
    validation = recipe.eval.batches * FORWARD_SHARE
    each = 1 + (validation / recipe.eval.every if recipe.eval.every else 0)
    steps = int((seconds / per_step - 2 * validation) / each)
    return min(max(steps // 10 * 10, fewest), most)
