"""Where a run starts: at step 0, from the newest checkpoint on disk, or from one in the memory of its nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from steelyard import checkpoint
from steelyard.checkpoint import memory_folder, memory_record, memory_restore
from steelyard.checkpoint.memory_save import MemorySaver
from steelyard.checkpoint.peer_copy import Nodes
from steelyard.checkpoint.step_folders import AllDamagedError
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run
from steelyard.parallel.world import World, run_on_rank0
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.training import timeline
from steelyard.training.engine import Engine

TIMELINE = "timeline"


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from, if any."""

    saved: checkpoint.Checkpoint | None
    is_own: bool
    """Whether it is a checkpoint of this run."""
    valid_losses: list[float]
    """The validation losses up to its step."""
    is_validated: bool
    """Whether its step has one."""
    described: str


def find_start(recipe: Recipe, folder: Run, world: World, start_from: str | None) -> Start:
    """Choose the checkpoint, and drop the records of steps that will be repeated. A collective call."""
    damaged: list[AllDamagedError] = []  # on rank 0

    def newest_on_disk() -> checkpoint.Checkpoint | None:
        try:
            return checkpoint.latest(folder.checkpoints, set_aside=True)
        except AllDamagedError as error:
            damaged.append(error)
            return None

    on_disk = run_on_rank0(world, newest_on_disk)
    newest, in_memory = on_disk, None
    root = _root(recipe, folder, world)
    if root is not None and recipe.checkpoint.memory_every and start_from is None:
        after = -1 if on_disk is None else on_disk.step
        in_memory = memory_restore.restore(root, folder.checkpoints, after, world)
        newest = in_memory or on_disk

    def prepared() -> Start:
        if damaged and newest is None:
            raise damaged[0]
        saved = _chosen(recipe, folder, newest, start_from)
        is_own = saved is not None and saved.path.parent == folder.checkpoints
        last = saved.step if saved is not None and is_own else -1
        others = "all on disk are damaged" if damaged else "none is on disk"
        others = others if on_disk is None else f"the newest on disk is of step {on_disk.step}"
        source = "" if in_memory is None else f" from a memory checkpoint ({others})"
        described = "" if saved is None else _described(folder, saved, is_own, source)
        folder.forget_after(last)
        timeline.forget_after(folder.path / TIMELINE, last)
        records = [record for record in folder.metrics() if "valid_loss" in record]
        recorded = [record["valid_loss"] for record in records if record["step"]]
        losses = [math.inf if loss is None else loss for loss in recorded]  # None is a non-finite loss.
        return Start(saved, is_own, losses, bool(records) and records[-1]["step"] == last, described)

    return run_on_rank0(world, prepared)


def memory_saver(recipe: Recipe, folder: Run, world: World, engine: Engine) -> MemorySaver | None:
    """What stores memory checkpoints, if the recipe requests them. A collective call after `find_start`."""
    root = _root(recipe, folder, world)
    if root is None:
        return None
    recorded = run_on_rank0(world, lambda: memory_record.read(folder))
    if recorded is not None and recorded[0] != root and world.local_rank == 0:
        memory_folder.remove_stale(recorded[0])  # of an attempt with another memory_dir, or at another path
    if not recipe.checkpoint.memory_every:
        if world.local_rank == 0:
            memory_folder.remove(root)  # of an attempt with another recipe
        hosts = Nodes.of(world).hosts
        run_on_rank0(world, lambda: memory_record.discard(folder, hosts))
        return None
    saver = MemorySaver(root, world, int(recipe.checkpoint.memory_device_gib * GIB))
    run_on_rank0(world, lambda: memory_record.add(folder, root, saver.nodes.hosts))
    engine.before_update = saver.staging.before_update
    return saver


def remove_memory(saver: MemorySaver, folder: Run) -> None:
    """Remove all memory checkpoints at the end of the run. A collective call."""
    saver.remove()
    if saver.world.is_rank0:
        memory_record.discard(folder, saver.nodes.hosts)


def _root(recipe: Recipe, folder: Run, world: World) -> Path | None:
    """The folder of memory checkpoints on every node; None if the run has never had any and requests none."""

    def found() -> Path | None:
        if recipe.checkpoint.memory_every:
            memory_folder.set_id(folder)
        return memory_folder.root_of(folder, recipe.checkpoint.memory_dir)

    return run_on_rank0(world, found)


def _chosen(
    recipe: Recipe, folder: Run, saved: checkpoint.Checkpoint | None, start_from: str | None
) -> checkpoint.Checkpoint | None:
    """The newest checkpoint, or the one that the user names; raises if they contradict each other or the recipe."""
    if start_from is not None:
        if saved is not None:
            raise UserError(
                f"{folder.path} already has a checkpoint of step {saved.step}; it cannot start from {start_from}",
                hint="give another --run, or resume this run with --resume auto",
            )
        saved = checkpoint.source(start_from)
    if saved is not None and saved.step > recipe.train.steps:
        raise UserError(
            f"{saved.path} is already at step {saved.step}, beyond train.steps = {recipe.train.steps}",
            where=recipe.where("train.steps"),
            hint="increase train.steps, or give another --run",
        )
    return saved


def _described(folder: Run, saved: checkpoint.Checkpoint, is_own: bool, source: str) -> str:
    """How the run resumes: from where, and how many steps it repeats, counted up to the last record."""
    if not is_own:
        return f"resumed at step {saved.step} from {saved.path}"
    reached = max((record["step"] for record in folder.metrics()), default=0)
    repeated = reached - saved.step
    steps = "1 step is" if repeated == 1 else f"{repeated} steps are"
    return f"resumed at step {saved.step}{source}" + (f"; {steps} repeated, up to {reached}" if repeated > 0 else "")
