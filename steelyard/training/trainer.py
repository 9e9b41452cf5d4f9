"""The training loop.

A run is determined by its recipe, which has the seed, and its data. The number of consumed samples determines the
samples of a step, so a checkpoint holds only tensors and a few counters, and a resumed run repeats its losses bit for
bit on the same layout. Another layout changes only rounding.
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
from steelyard.core.errors import Interrupted
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run, for_training, now, session
from steelyard.parallel import mesh as meshes
from steelyard.parallel.world import World, gather_errors, init_distributed, raise_on_all_ranks, run_on_rank0
from steelyard.sizes.param_count import described, flops_per_token
from steelyard.tokens.dataloader import Loader
from steelyard.tokens.samples import Samples
from steelyard.training import device as devices
from steelyard.training import garbage, host_info, peak_memory, run_status, setup
from steelyard.training.config_check import refuse_other_recipes
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.graceful_stop import StopRequest, stop_request
from steelyard.training.lr_schedule import TrainProgress, learning_rate
from steelyard.training.metrics import Recorder, line
from steelyard.training.nonfinite import SkippedStep, SkippedSteps
from steelyard.training.profiler import PROFILE, Profiler
from steelyard.training.resume import TIMELINE, find_start, memory_saver, remove_memory
from steelyard.training.straggler import StepTimer
from steelyard.training.throughput import Speed
from steelyard.training.train_state import TrainState
from steelyard.training.validation_loss import check_patience, validation_loss
from steelyard.training.watchdog import Watchdog

STEPS_BEFORE_MEMORY_REPORT = 2
OpenData = Callable[[Recipe, World], tuple[Samples, Samples | None]]


def run(
    recipe: Recipe,
    path: Path | None = None,
    extension: Extension | None = None,
    resume: str = "auto",
    open_data: OpenData = setup.open_data,
) -> Run:
    """Train the recipe and return the run folder.

    `resume` is `auto` (resume an unfinished run of the same recipe), `never` (a new run) or a checkpoint to start from.
    `open_data` opens the training and validation samples; by default those of `[data]`.
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
        recipe = setup.with_recompute(recipe, world, device)
        training, validation = open_data(recipe, world)
        folder = run_on_rank0(world, lambda: for_training(recipe, path, fresh=resume == "never"))
        with run_status.writing(folder, world):
            start_from = None if resume in ("auto", "never") else resume
            assert extension is not None or recipe.sparsity is None, "[sparsity] needs its extension"
            extension = extension or Extension()
            data = (training, validation, end_of_document)
            trainer = Trainer(recipe, folder, device, world, *data, extension, start_from)
            try:
                with stop_request() as stop:
                    state = trainer.train(stop)
            except Interrupted as interruption:
                run_status.conclude(folder, world, "interrupted")
                raise interruption
            except Exception as error:
                if world.size == 1:  # A save that needs ranks that have exited would not end.
                    trainer.let_saves_end()
                in_memory = None if trainer.memory is None else trainer.memory.newest
                raise run_status.failed(folder, world, error, in_memory) from error
            run_status.conclude(folder, world, state)
    return folder


class Trainer:
    """One training run: engine, data, metrics and checkpoints."""

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
        start_from: str | None,
    ) -> None:
        self.recipe, self.folder, self.device, self.world = recipe, folder, device, world
        self.training, self.validation = training, validation
        self.extension = extension
        self.mesh = meshes.make(recipe.parallel, device.type)
        memory_before = peak_memory.begin(device)
        self.engine = Engine(recipe, self.mesh, device, extension, end_of_document)
        if world.is_rank0 and (reason := self.engine.dense_attention()) is not None:
            console.warn(f"attention uses a dense mask, whose memory grows with the square of the sequence: {reason}")
        self.train_state = TrainState(recipe, device)
        self.skipped_steps = SkippedSteps(self.engine, training, world)
        self.saver = checkpoint.Saver(folder.checkpoints, recipe.checkpoint.keep_last, recipe.checkpoint.background)
        self.recorder = Recorder(recipe, folder, writes=world.is_rank0)
        self.speed = Speed(recipe, device, world.size)
        self.step_timer = StepTimer(self.mesh, device, Watchdog(folder.path, world.rank, is_on=world.size > 1))
        traces, timers = folder.path / PROFILE, self.engine.timeline
        self.profiler = Profiler(recipe.log, traces, device, world.rank, timers, self.recorder.paused)
        self._start_or_resume(start_from)
        self.memory = memory_saver(recipe, folder, world, self.engine)
        if world.is_rank0:
            folder.follow(recipe)
            started = folder.manifest().get("started", now())
            hardware = {"device": str(device), "device_name": devices.name(device), "memory_before": memory_before}
            folder.update(**session(world.size), **hardware, started=started, ended=None)
        host_info.report(folder, recipe, self.mesh, world, device, self.train_state.counters.step)

    def train(self, stop: StopRequest) -> str:
        """Run the remaining steps. Returns the state of the run.

        `finished`, also after early stopping, or `stopped` by `train.max_hours`; a signal raises `Interrupted`.
        """
        recipe, counters, train = self.recipe, self.train_state.counters, self.recipe.train
        mesh, length = self.mesh, recipe.data.sequence_length
        deadline = time.monotonic() + 3600 * train.max_hours if train.max_hours else math.inf
        batches = Loader(self.training, train.batch_at, counters.samples, rank=mesh.data.index, ranks=mesh.data.size)
        total = train.samples_in(train.steps) * length
        bar = console.progress("train", total, "tokens", done=counters.tokens, lines=False)
        self.speed.begin(counters.tokens)
        report_memory_at = counters.step + STEPS_BEFORE_MEMORY_REPORT
        with bar as progress, self.recorder, batches, self.step_timer.watchdog, garbage.at_fixed_steps() as collect:
            if self.validates_first and not self._validate(stop):
                return self._stopped(stop.agreed_by_clock)
            while counters.step < train.steps:
                batch = train.batch_at(counters.samples)
                rate = self._learning_rate(batch)
                with self.profiler.around(counters.step + 1):
                    self._step(batches, batch, rate)
                is_last = counters.step == train.steps
                if is_last or counters.step % recipe.log.every == 0:
                    self._record(rate, batch)
                if counters.step == report_memory_at:
                    console.say(peak_memory.report(self.device))
                progress.advance(batch * length, note=f"step {counters.step}/{train.steps}")
                collect(counters.step)
                is_best = out_of_patience = cut_short = False
                if self._is_validation_due():
                    cut_short = not self._validate(stop)
                    if not cut_short:
                        is_best, out_of_patience = check_patience(self.valid_losses, recipe.eval.patience)
                    is_best = is_best and recipe.checkpoint.keep_best
                out_of_time = time.monotonic() > deadline
                stopping = stop.agreed_after_step(out_of_time) and (cut_short or not (is_last or out_of_patience))
                is_end = (is_last or stopping or out_of_patience) and recipe.checkpoint.at_end
                if is_end or is_best or _is_multiple(recipe.checkpoint.every, counters.step):
                    self._save(is_best)
                elif not (is_last or stopping or out_of_patience):
                    self._save_to_memory()
                if stopping or out_of_patience:
                    self.profiler.finish()
                if stopping:
                    return self._stopped(stop.agreed_by_clock)
                if out_of_patience:
                    break
            stop.finish()
            self._finish_saves(has_finished=True)
        return "finished"

    def _step(self, batches: Loader, batch: int, rate: float) -> None:
        """One step on the next batch, with a timeline if the recipe requests it."""
        log, timeline, step = self.recipe.log, self.engine.timeline, self.train_state.counters.step + 1
        is_timed = log.timeline is not None and log.timeline[0] <= step <= log.timeline[1]
        if is_timed:
            timeline.begin()
        with self.step_timer.time_data():
            rows = next(batches)
        self.extension.begin_step(step, batch, self.train_state.loss_scale.scale)
        with self.step_timer.time_step(step):
            outcome = self.engine.step(rows.rows, rows.first, rate, rows.labels, self.train_state.loss_scale.scale)
        if is_timed:
            timeline.end(step, self.folder.path / TIMELINE, self.world.rank)
        inputs = SkippedStep(
            step, rows.first, len(rows.rows["tokens_BL"]), batch, rows.labels, self.train_state.loss_scale.scale
        )
        self.skipped_steps.note(inputs, outcome[2])
        self.train_state.add(*outcome, batch, rows.labels)
        self.recorder.step_done()
        if self.train_state.is_due:
            self._sync_counters()

    def _sync_counters(self) -> None:
        """Read the outcome of the last steps from the device: report skipped steps, and fail if there are too many."""
        self.train_state.settle()
        with self.recorder.paused():
            self.skipped_steps.check(self.train_state.counters, self.train_state.exceeded())

    def _stopped(self, by_clock: bool) -> str:
        """End after a stop request: raise `Interrupted`, or return the state if `train.max_hours` ended the run."""
        kept = self._finish_saves(has_finished=False)
        step, train = self.train_state.counters.step, self.recipe.train
        message = f"stopped at step {step} of {train.steps}{kept}"
        if self.recipe.checkpoint.at_end and step:
            message = f"saved step {step} of {train.steps}; the same command resumes {self.folder.path}"
        if not by_clock:
            raise Interrupted(message)
        console.say(f"{train.max_hours:g} hours have passed: {message}")
        return "stopped"

    def _learning_rate(self, batch: int) -> float:
        """The learning rate of the next step."""
        train, length = self.recipe.train, self.recipe.data.sequence_length
        samples = train.samples_in(train.steps)
        end = TrainProgress(train.steps, samples, samples * length)
        return learning_rate(self.recipe.optim, self.train_state.counters.progress_after(batch, length), end)

    def _record(self, rate: float, batch: int) -> None:
        self._sync_counters()
        counters = self.train_state.counters
        seconds, steps = self.recorder.seconds()
        record = {
            "step": counters.step,
            "loss": self.train_state.mean_loss(),
            "grad_norm": self.train_state.norm.item(),
            "learning_rate": rate,
            "tokens": counters.tokens,
            "samples": counters.samples,
            "global_batch": batch,
            "loss_scale": self.train_state.loss_scale.scale,
            "skipped": counters.skipped,
            "nonfinite": counters.nonfinite,
        }
        record |= self.extension.metrics() | self.engine.balance.metrics()
        record |= self.speed.of(counters.tokens, seconds, steps)
        record |= self.step_timer.reported(seconds, steps)
        record["peak_memory"] = peak_memory.peak(self.device)
        self.recorder.record(record)
        console.say(line(record, self.recipe.train.steps))

    def _is_validation_due(self) -> bool:
        step = self.train_state.counters.step
        return step in (0, self.recipe.train.steps) or _is_multiple(self.recipe.eval.every, step)

    def _validate(self, stop: StopRequest) -> bool:
        """Measure and record the loss on the validation split; False if the run has to stop before it is known."""
        if self.validation is None:
            return True
        step = self.train_state.counters.step
        with self.recorder.paused():
            valid_loss = validation_loss(self.engine, self.validation, stop)
            if valid_loss is None:
                console.say(f"step {step}: validation stopped; it is repeated when the run resumes")
                return False
            if step:
                self.valid_losses.append(valid_loss)
            self.recorder.record({"step": step, "valid_loss": valid_loss})
            perplexity = f", perplexity {units.perplexity(valid_loss)}" if self.extension.is_likelihood else ""
            console.say(f"step {step}: validation loss {valid_loss:.4f}{perplexity}")
        return True

    def _save(self, is_best: bool) -> None:
        self._sync_counters()
        with self.recorder.paused():
            state = self.train_state.state() | self.extension.state()
            if is_best:
                state[checkpoint.VALID_LOSS] = self.valid_losses[-1]
            self.saver.save(self.engine.state_shards(for_saving=True), state)
            self.saved_step = self.train_state.counters.step

    def _save_to_memory(self) -> None:
        """Start a memory checkpoint if one is due (`checkpoint.memory_every`)."""
        if not _is_multiple(self.recipe.checkpoint.memory_every, self.train_state.counters.step):
            return
        if self.memory is not None and self.memory.is_ready():
            self._sync_counters()
            state = self.train_state.state() | self.extension.state()
            self.memory.save(self.engine.state_shards(for_saving=True), state)

    def let_saves_end(self) -> None:
        """Wait for checkpoints that are being written, after an error."""
        self.saver.let_end()
        if self.memory is not None:
            self.memory.let_end()

    def _finish_saves(self, has_finished: bool) -> str:
        """Wait for the last checkpoint. Memory checkpoints are removed, unless the run needs them to continue."""
        self.saver.wait()
        if self.memory is None:
            return ""
        self.memory.let_end()
        if not has_finished and self.memory.newest is not None and self.memory.newest[0] > self.saved_step:
            step, folder = self.memory.newest
            return f"; step {step} is in {folder}, from where the same command on the same nodes resumes"
        remove_memory(self.memory, self.folder)
        return ""

    def _start_or_resume(self, start_from: str | None) -> None:
        begin = find_start(self.recipe, self.folder, self.world, start_from)
        saved, self.valid_losses = begin.saved, begin.valid_losses
        if saved is None:
            self.engine.initialise()
            how = self.extension.start(self.engine, self.world)
            self.engine.optimizer.copy_weights_to_host()
        else:
            self.engine.optimizer.make_state()
            if not all(self.extension.saves(shard) for shard in self.engine.param_shards):
                self.engine.initialise()
            with gather_errors(self.world):
                checkpoint.load(saved, self.engine.state_shards(for_saving=False))
            self.extension.resumed(self.engine, self.world, saved.state)
            self.engine.optimizer.finish_loading()
            self.train_state.restore(saved.state)
            how = begin.described
        self.saved_step = self.train_state.counters.step
        # A stop may have ended the validation of the saved step.
        is_missing = begin.is_own and self._is_validation_due() and not begin.is_validated
        self.validates_first = saved is None or is_missing
        console.say(f"{self.folder.path}: {how}, {self._summary()}")

    def _summary(self) -> str:
        config, length = self.recipe.model, self.recipe.data.sequence_length
        ranks = f"{self.world.size} ranks, " if self.world.size > 1 else ""
        return (
            f"{config.family} with {described(config)} parameters, "
            f"{flops_per_token(config, length) / 1e9:.3g} GFLOP per token, "
            f"{self.recipe.train.steps} steps on {ranks}{self.device.type}"
        )


def _is_multiple(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
