"""The training loop.

A run is a pure function of recipe and seed: which samples a step sees follows from how many were consumed, so a
checkpoint holds tensors and a handful of counters, and a killed run repeats its losses to the bit. How many ranks share
the work changes nothing but rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from steelyard import checkpoint
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run, for_training, now, session
from steelyard.parallel import mesh as meshes
from steelyard.parallel.world import World, gather_errors, init_distributed, raise_on_all_ranks, run_on_rank0
from steelyard.sizes.param_count import flops_per_token, parameters
from steelyard.tokens.loader import Loader, labels_in, read
from steelyard.tokens.samples import Samples
from steelyard.training import device as devices
from steelyard.training import host_info, peak_memory, run_status, setup, timeline
from steelyard.training.config_check import refuse_other_recipes
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.graceful_stop import StopRequest, stop_request
from steelyard.training.lr_schedule import TrainProgress, learning_rate
from steelyard.training.metrics import Recorder, line
from steelyard.training.nonfinite import SkippedStep, SkippedSteps
from steelyard.training.profiler import PROFILE, Profiler
from steelyard.training.straggler import StepTimer
from steelyard.training.throughput import Speed
from steelyard.training.train_state import TrainState

STEPS_BEFORE_MEMORY_REPORT = 2
TIMELINE = "timeline"


OpenData = Callable[[Recipe, World], tuple[Samples, Samples | None]]


def run(
    recipe: Recipe,
    path: Path | None = None,
    extension: Extension | None = None,
    resume: str = "auto",
    open_data: OpenData = setup.open_data,
) -> Run:
    """Train as the recipe says and return the run's folder.

    `resume` is `auto` (an unfinished run of the same recipe goes on), `never` (a new run) or a checkpoint to begin at.
    `open_data` gives the samples to train and validate on, where they are not those of `[data]`.
    """
    device = devices.choose(recipe)
    with init_distributed(device.type, recipe.parallel.timeout_minutes) as world:
        console.quiet = console.quiet or not world.is_rank0
        with raise_on_all_ranks(world):
            refuse_other_recipes(recipe, world)
            setup.refuse_unfit(recipe, world)
            end_of_document = setup.end_of_document(recipe)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        training, validation = open_data(recipe, world)
        folder = run_on_rank0(world, lambda: for_training(recipe, path, fresh=resume == "never"))
        with run_status.writing(folder, world):
            begin_at = None if resume in ("auto", "never") else resume
            assert extension is not None or recipe.sparsity is None, "[sparsity] needs its extension"
            extension = extension or Extension()
            training_run = Trainer(
                recipe, folder, device, world, training, validation, end_of_document, extension, begin_at
            )
            try:
                with stop_request() as stop:
                    state = training_run.until_done(stop)
            except Interrupted as interruption:
                run_status.conclude(folder, world, "interrupted")
                raise interruption
            except Exception as error:
                if world.size == 1:  # With others gone, a save that needs them would not end.
                    training_run.saver.let_end()
                raise run_status.failed(folder, world, error) from error
            run_status.conclude(folder, world, state)
    return folder


class Trainer:
    """A run under way: the engine, the data, the records, the checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Run,
        device: torch.device,
        world: World,
        training: Samples,
        validation: Samples | None,
        end_of_document: int | None,
        extension: Extension,
        begin_at: str | None,
    ) -> None:
        self.recipe, self.folder, self.device, self.world = recipe, folder, device, world
        self.training, self.validation = training, validation
        self.extension = extension
        self.mesh = meshes.make(recipe.parallel, device.type)
        memory_before = peak_memory.begin(device)
        self.engine = Engine(recipe, self.mesh, device, extension, end_of_document)
        self.tally = TrainState(recipe, device)
        self.skipped_steps = SkippedSteps(self.engine, training, world)
        self.saver = checkpoint.Saver(folder.checkpoints, recipe.checkpoint.keep_last, recipe.checkpoint.background)
        self.recorder = Recorder(recipe, folder, writes=world.is_rank0)
        self.speed = Speed(recipe, device, world.size)
        self.pace = StepTimer(self.mesh, device)
        traces, timers = folder.path / PROFILE, self.engine.timeline
        self.profiler = Profiler(recipe.log, traces, device, world.rank, timers, self.recorder.paused)
        self._start_or_resume(begin_at)
        if world.is_rank0:
            folder.follow(recipe)
            begun = folder.manifest().get("started", now())
            named = {"device": str(device), "device_name": devices.name(device), "memory_before": memory_before}
            folder.update(**session(world.size), **named, started=begun, ended=None)
        host_info.report(folder, recipe, self.mesh, world, device)

    def until_done(self, stop: StopRequest) -> str:
        """Take the steps that are left. Returns the state of the run: finished, or stopped by the clock."""
        recipe, counters, train = self.recipe, self.tally.counters, self.recipe.train
        mesh, length = self.mesh, recipe.data.sequence_length
        deadline = time.monotonic() + 3600 * train.max_hours if train.max_hours else float("inf")
        batches = Loader(self.training, train.batch_at, counters.samples, rank=mesh.data.index, ranks=mesh.data.size)
        total = train.samples_in(train.steps) * length
        bar = console.progress("train", total, "tokens", done=counters.tokens, lines=False)
        self.speed.begin(counters.tokens)
        report_memory_at = counters.step + STEPS_BEFORE_MEMORY_REPORT
        with bar as progress, self.recorder, batches:
            if counters.step == 0:
                self._validate()
            while counters.step < train.steps:
                batch = train.batch_at(counters.samples)
                rate = self._rate(batch)
                with self.profiler.around(counters.step + 1):
                    self._step(batches, batch, rate)
                is_last = counters.step == train.steps
                if is_last or counters.step % recipe.log.every == 0:
                    self._record(rate, batch)
                if counters.step == report_memory_at:
                    console.say(peak_memory.report(self.device))
                progress.advance(batch * length, note=f"step {counters.step}/{train.steps}")
                is_best = gave_up = False
                if is_last or _is_due(recipe.eval.every, counters.step):
                    self._validate()
                    is_best, gave_up = self._judged()
                out_of_time = time.monotonic() > deadline
                stopping = stop.agreed(out_of_time) and not (is_last or gave_up)
                is_end = (is_last or stopping or gave_up) and recipe.checkpoint.at_end
                if is_end or is_best or _is_due(recipe.checkpoint.every, counters.step):
                    self._save(is_best)
                if stopping or gave_up:
                    self.profiler.finish()
                if stopping:
                    return self._stopped(stop.agreed_by_clock)
                if gave_up:
                    break
            self.saver.wait()
        return "finished"

    def _step(self, batches: Loader, batch: int, rate: float) -> None:
        """One step on the next batch, timed where the recipe asks for it."""
        log, timeline, step = self.recipe.log, self.engine.timeline, self.tally.counters.step + 1
        is_timed = log.timeline is not None and log.timeline[0] <= step <= log.timeline[1]
        if is_timed:
            timeline.begin()
        with self.pace.of_data():
            rows = next(batches)
        self.extension.begin_step(step, batch, self.tally.loss_scale.scale)
        with self.pace.of_a_step():
            outcome = self.engine.step(rows.rows, rows.first, rate, rows.labels, self.tally.loss_scale.scale)
        if is_timed:
            timeline.end(step, self.folder.path / TIMELINE, self.world.rank)
        given = SkippedStep(
            step, rows.first, len(rows.rows["tokens_BL"]), batch, rows.labels, self.tally.loss_scale.scale
        )
        self.skipped_steps.note(given, outcome[2])
        self.tally.add(*outcome, batch, rows.labels)
        self.recorder.step_done()
        if self.tally.is_due:
            self._settle()

    def _settle(self) -> None:
        """Learn from the device how the last steps ended: report skipped ones, and stop where there are too many."""
        self.tally.settle()
        with self.recorder.paused():
            self.skipped_steps.check(self.tally.counters, self.tally.exceeded())

    def _stopped(self, by_clock: bool) -> str:
        """End after what was asked to stop: as an interruption, or, by the clock, as was intended."""
        self.saver.wait()
        step, train = self.tally.counters.step, self.recipe.train
        saved = f"saved step {step} of {train.steps}; the same command resumes {self.folder.path}"
        message = saved if self.recipe.checkpoint.at_end else f"stopped at step {step} of {train.steps}"
        if not by_clock:
            raise Interrupted(message)
        console.say(f"{train.max_hours:g} hours have passed: {message}")
        return "stopped"

    def _rate(self, batch: int) -> float:
        """The learning rate of the coming step."""
        train, length = self.recipe.train, self.recipe.data.sequence_length
        samples = train.samples_in(train.steps)
        end = TrainProgress(train.steps, samples, samples * length)
        return learning_rate(self.recipe.optim, self.tally.counters.progress_after(batch, length), end)

    def _record(self, rate: float, batch: int) -> None:
        self._settle()
        counters = self.tally.counters
        seconds, steps = self.recorder.seconds()
        record = {
            "step": counters.step,
            "loss": self.tally.mean_loss(),
            "grad_norm": self.tally.norm.item(),
            "learning_rate": rate,
            "tokens": counters.tokens,
            "samples": counters.samples,
            "global_batch": batch,
            "loss_scale": self.tally.loss_scale.scale,
            "skipped": counters.skipped,
            "nonfinite": counters.nonfinite,
        }
        record |= self.extension.metrics() | self.speed.of(counters.tokens, seconds, steps)
        record |= self.pace.reported(seconds, steps)
        record["peak_memory"] = peak_memory.peak(self.device)
        self.recorder.record(record)
        console.say(line(record, self.recipe.train.steps))

    def _validate(self) -> None:
        """Measure the loss on the validation share: the same samples every time."""
        if self.validation is None:
            return
        with self.recorder.paused():
            batch = self.recipe.train.global_batch
            part = batch // self.mesh.data.size
            first = self.mesh.data.index * part
            batches = self.recipe.eval.batches
            rows = (read(self.validation, number * batch + first, part) for number in range(batches))
            loss_sum = sum(self.engine.evaluate(each).item() for each in rows)
            valid_loss = loss_sum / labels_in(self.validation, 0, batches * batch, self.recipe.data.sequence_length)
            if self.tally.counters.step:
                self.valid_losses.append(valid_loss)
            self.recorder.record({"step": self.tally.counters.step, "valid_loss": valid_loss})
            beside = f", perplexity {units.perplexity(valid_loss)}" if self.extension.is_likelihood else ""
            console.say(f"step {self.tally.counters.step}: validation loss {valid_loss:.4f}{beside}")

    def _judged(self) -> tuple[bool, bool]:
        """Whether the last validation is the best, and to be kept, and whether to give up waiting for a better.

        What the run began with does not count: it is not the run's to keep.
        """
        losses = [loss if math.isfinite(loss) else math.inf for loss in self.valid_losses]  # No number is no best.
        patience = self.recipe.eval.patience
        if not losses:
            return False, False
        since = len(losses) - 1 - losses.index(min(losses))
        gave_up = 0 < patience <= since
        if gave_up:
            console.say(f"no better validation loss in {since} validations: the run ends here")
        is_best = since == 0 and losses[-1] < math.inf
        return self.recipe.checkpoint.keep_best and is_best, gave_up

    def _save(self, is_best: bool) -> None:
        self._settle()
        with self.recorder.paused():
            state = self.tally.state() | self.extension.state()
            if is_best:
                state[checkpoint.VALID_LOSS] = self.valid_losses[-1]
            self.saver.save(self.engine.pieces(for_saving=True), state)

    def _start_or_resume(self, begin_at: str | None) -> None:
        def newest() -> tuple[checkpoint.Checkpoint | None, bool, list[float]]:
            saved = checkpoint.latest(self.folder.checkpoints, set_aside=True)
            if begin_at is not None:
                if saved is not None:
                    raise UserError(
                        f"{self.folder.path} has steps of its own, up to {saved.step}, and cannot begin at {begin_at}",
                        hint="give another --run, or go on with it by --resume auto",
                    )
                saved = checkpoint.source(begin_at)
            if saved is not None and saved.step > self.recipe.train.steps:
                raise UserError(
                    f"{saved.path} is at step {saved.step} already, beyond train.steps = {self.recipe.train.steps}",
                    where=self.recipe.where("train.steps"),
                    hint="ask for more steps, or give another --run",
                )
            is_own = saved is not None and saved.path.parent == self.folder.checkpoints
            last = saved.step if saved is not None and is_own else -1
            self.folder.forget_after(last)
            timeline.forget_after(self.folder.path / TIMELINE, last)
            reported = [
                record["valid_loss"] for record in self.folder.metrics() if "valid_loss" in record and record["step"]
            ]
            losses = [math.inf if loss is None else loss for loss in reported]  # None was no finite number.
            return saved, is_own, losses

        saved, is_own, self.valid_losses = run_on_rank0(self.world, newest)
        if saved is None:
            self.engine.initialise()
            how = self.extension.start(self.engine, self.world)
            self.engine.optimizer.take_weights()
        else:
            self.engine.optimizer.make_state()
            if not all(self.extension.saves(part) for part in self.engine.parts):
                self.engine.initialise()
            with gather_errors(self.world):
                checkpoint.load(saved, self.engine.pieces(for_saving=False))
            self.extension.resumed(self.engine, self.world, saved.state)
            self.engine.optimizer.take_weights()
            self.tally.restore(saved.state)
            how = f"resumed at step {saved.step}" + ("" if is_own else f" of {saved.path}")
        console.say(f"{self.folder.path}: {how}, {self._summary()}")

    def _summary(self) -> str:
        shape, length = self.recipe.model, self.recipe.data.sequence_length
        size = units.count(parameters(shape).total)
        ranks = f"{self.world.size} ranks, " if self.world.size > 1 else ""
        return (
            f"{shape.family} with {size} parameters, {units.count(flops_per_token(shape, length))}FLOP a token, "
            f"{self.recipe.train.steps} steps on {ranks}{self.device.type}"
        )


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
