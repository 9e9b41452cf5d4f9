"""The training loop.

A run is a pure function of recipe and seed: which samples a step sees follows from how many were consumed, so a
checkpoint holds tensors and a handful of counters, and a killed run repeats its losses to the bit. How many ranks share
the work changes nothing but rounding.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from steelyard import checkpoint
from steelyard.checkpoint import formats
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import Fault, Interrupted, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run, for_training, now, session
from steelyard.parallel import mesh as meshes
from steelyard.parallel.world import World, alike, everywhere, join
from steelyard.sizes.model import flops_per_token, parameters
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens.loader import Loader, read
from steelyard.tokens.samples import Samples, open_samples
from steelyard.train import device as devices
from steelyard.train import memory
from steelyard.train.counters import Counters
from steelyard.train.engine import Engine
from steelyard.train.extension import Extension
from steelyard.train.metrics import Recorder, check_wandb, line
from steelyard.train.scaling import LossScale
from steelyard.train.schedule import Progress, learning_rate
from steelyard.train.speed import Speed
from steelyard.train.stopping import StopRequest, stop_request

STEPS_BEFORE_MEMORY_REPORT = 2


def run(recipe: Recipe, path: Path | None = None, extension: Extension | None = None, resume: str = "auto") -> Run:
    """Train as the recipe says and return the run's folder.

    `resume` is `auto` (an unfinished run of the same recipe goes on), `never` (a new run) or a checkpoint to begin at.
    """
    device = devices.choose(recipe)
    with join(device.type, recipe.parallel.timeout_minutes) as world:
        console.quiet = console.quiet or not world.is_first
        with alike(world):
            _refuse_unfit(recipe, world)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        training, validation = _open_data(recipe, world)
        folder = everywhere(world, lambda: for_training(recipe, path, fresh=resume == "never"))
        with _writing(folder, world):
            begin_at = None if resume in ("auto", "never") else resume
            training_run = Training(recipe, folder, device, world, training, validation, extension, begin_at)
            try:
                with stop_request() as stop:
                    state = training_run.until_done(stop)
            except Interrupted as interruption:
                _conclude(folder, world, "interrupted")
                raise interruption
            except Exception as error:
                raise _failed(folder, world, error) from error
            _conclude(folder, world, state)
    return folder


class Training:
    """A run under way: the engine, the data, the records, the checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Run,
        device: torch.device,
        world: World,
        training: Samples,
        validation: Samples | None,
        extension: Extension | None,
        begin_at: str | None,
    ) -> None:
        self.recipe, self.folder, self.device, self.world = recipe, folder, device, world
        self.training, self.validation = training, validation
        self.extension = extension or Extension()
        self.mesh = meshes.make(recipe.parallel, device.type)
        self.engine = Engine(recipe, self.mesh, device, self.extension, _end_of_document(recipe))
        self.counters = Counters()
        self.loss_scale = LossScale(1.0, recipe.train.loss_scale_window)
        if recipe.train.precision == "fp16":
            self.loss_scale.scale = recipe.train.loss_scale
        self.saver = checkpoint.Saver(folder.checkpoints, recipe.checkpoint.keep_last, recipe.checkpoint.background)
        self.recorder = Recorder(recipe, folder, writes=world.is_first)
        self.speed = Speed(recipe, device, world.size)
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._start_or_resume(begin_at)
        if world.is_first:
            folder.follow(recipe)
            begun = folder.manifest().get("started", now())
            folder.update(**session(world.size), device=str(device), started=begun, ended=None)

    def until_done(self, stop: StopRequest) -> str:
        """Take the steps that are left. Returns the state of the run: finished, or stopped by the clock."""
        recipe, counters, train = self.recipe, self.counters, self.recipe.train
        length = recipe.data.sequence_length
        batches = Loader(
            self.training, train.batch_at, counters.samples, rank=self.mesh.data.index, ranks=self.mesh.data.size
        )
        total = train.samples_in(train.steps) * length
        deadline = time.monotonic() + 3600 * train.hours if train.hours else float("inf")
        bar = console.progress("train", total, "tokens", done=counters.tokens, lines=False)
        first_step = counters.step
        self.speed.begin(counters.tokens)
        with bar as progress, self.recorder, batches:
            if counters.step == 0:
                self._validate()
            while counters.step < train.steps:
                timed = _covers(recipe.log.timeline, counters.step + 1)
                if timed:
                    self.engine.timeline.begin()
                batch_size = train.batch_at(counters.samples)
                rate = self._rate(batch_size)
                batch = next(batches)
                with self.engine.timeline.profiled(recipe.log.profile, counters.step + 1):
                    loss, norm, skipped = self.engine.step(
                        batch.rows, batch.first, rate, batch_size * length, self.loss_scale.scale
                    )
                if timed:
                    self.engine.timeline.end(counters.step + 1, self.folder.path / "timeline", self.world.rank)
                counters.step += 1
                counters.samples += batch_size
                counters.tokens += batch_size * length
                self._count(loss, norm, skipped, batch_size)
                self.recorder.step_done()
                last = counters.step == train.steps
                if counters.step % recipe.log.every == 0 or last:
                    self._record(rate, batch_size)
                if counters.step - first_step == STEPS_BEFORE_MEMORY_REPORT:
                    console.say(memory.report(self.device))
                progress.advance(batch_size * length, note=f"step {counters.step}/{train.steps}")
                if last or (recipe.eval.every and counters.step % recipe.eval.every == 0):
                    self._validate()
                stop.asked = stop.asked or (out_of_time := time.monotonic() > deadline)
                stopping = stop.agreed() and not last
                if last or stopping or (recipe.checkpoint.every and counters.step % recipe.checkpoint.every == 0):
                    self._save()
                if stopping:
                    self.saver.wait()
                    message = (
                        f"saved step {counters.step} of {train.steps}; the same command resumes {self.folder.path}"
                    )
                    if not train.hours or not self._agree(out_of_time):
                        raise Interrupted(message)
                    console.say(f"{train.hours:g} hours have passed: {message}")
                    return "stopped"
            self.saver.wait()
        return "finished"

    def _rate(self, batch: int) -> float:
        """The learning rate of the coming step."""
        train, length = self.recipe.train, self.recipe.data.sequence_length
        samples = train.samples_in(train.steps)
        end = Progress(train.steps, samples, samples * length)
        return learning_rate(self.recipe.optim, self.counters.progress_after(batch, length), end)

    def _count(self, loss: torch.Tensor, norm: torch.Tensor, skipped: torch.Tensor, batch: int) -> None:
        """Add a step to the sums, on the device; with fp16 the schedule and the scale wait for the outcome."""
        counts = torch.isfinite(loss)
        tokens = batch * self.recipe.data.sequence_length
        self._sums[0] += torch.where(counts, loss, 0.0)
        self._sums[1] += counts * tokens
        self._sums[2] += skipped
        self._sums[3] = (self._sums[3] + 1) * skipped
        self._last = loss, norm
        is_fp16 = self.recipe.train.precision == "fp16"
        moved = not (is_fp16 and bool(skipped))
        if is_fp16:
            self.loss_scale.after(overflowed=not moved)
        if moved:
            self.counters.schedule_steps += 1
            self.counters.schedule_samples += batch
        if self.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        """Bring the device's sums into the counters, and end a run that has only been skipping steps."""
        counters = self.counters
        loss_sum, tokens, skipped, streak = self._sums.tolist()
        counters.loss_sum += loss_sum
        counters.loss_tokens += int(tokens)
        counters.streak = int(streak)
        if self.recipe.train.precision == "fp16":
            counters.skipped += int(skipped)
        else:
            counters.nonfinite += int(skipped)
        self._sums[:3] = 0
        if counters.streak > self.recipe.train.nonfinite_limit:
            loss, norm = (value.item() for value in self._last)
            what = f"the gradient norm became {norm}" if math.isfinite(loss) else f"the loss became {loss}"
            raise Fault(
                f"{what} by step {counters.step}, the last {counters.streak} of which were skipped",
                mend="lower optim.learning_rate",
            )

    def _record(self, rate: float, batch: int) -> None:
        self._settle()
        counters = self.counters
        seconds, steps = self.recorder.seconds()
        record = {
            "step": counters.step,
            "loss": counters.loss_sum / counters.loss_tokens if counters.loss_tokens else None,
            "grad_norm": self._last[1].item(),
            "learning_rate": rate,
            "tokens": counters.tokens,
            "samples": counters.samples,
            "global_batch": batch,
            "loss_scale": self.loss_scale.scale,
            "skipped": counters.skipped,
            "nonfinite": counters.nonfinite,
        }
        counters.loss_sum, counters.loss_tokens = 0.0, 0
        record |= self.extension.metrics() | self.speed.of(counters.tokens, seconds, steps)
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
            valid_loss = loss_sum / (batches * batch * self.recipe.data.sequence_length)
            self.recorder.record({"step": self.counters.step, "valid_loss": valid_loss})
            perplexity = units.perplexity(valid_loss)
            console.say(f"step {self.counters.step}: validation loss {valid_loss:.4f}, perplexity {perplexity}")

    def _save(self) -> None:
        with self.recorder.paused():
            self._settle()
            self.counters.loss_scale = {"scale": self.loss_scale.scale, "good_steps": self.loss_scale.good_steps}
            self.saver.save(self.engine.pieces(for_saving=True), self.counters.state())

    def _agree(self, said: bool) -> bool:
        """Whether any rank says so."""
        request = StopRequest()
        request.asked = said
        return request.agreed()

    def _start_or_resume(self, begin_at: str | None) -> None:
        def newest() -> tuple[checkpoint.Checkpoint | None, bool]:
            saved = checkpoint.latest(self.folder.checkpoints)
            if saved is None and begin_at is not None:
                saved = checkpoint.source(begin_at)
            if saved is not None and saved.step > self.recipe.train.steps:
                raise UserError(
                    f"{saved.path} is at step {saved.step} already, beyond train.steps = {self.recipe.train.steps}",
                    where=self.recipe.where("train.steps"),
                    mend="ask for more steps, or give another --run",
                )
            is_own = saved is not None and saved.path.parent == self.folder.checkpoints
            self.folder.forget_after(saved.step if saved is not None and is_own else -1)
            return saved, is_own

        saved, is_own = everywhere(self.world, newest)
        if saved is None:
            how = self._start()
        else:
            self.engine.optimizer.make_state()
            with alike(self.world):
                checkpoint.load(saved, self.engine.pieces(for_saving=False))
            self.engine.optimizer.take_weights()
            self.counters = Counters(**saved.state)
            for key, value in self.counters.loss_scale.items():
                setattr(self.loss_scale, key, type(getattr(self.loss_scale, key))(value))
            self._sums[3] = self.counters.streak
            how = f"resumed at step {saved.step}" + ("" if is_own else f" of {saved.path}")
        console.say(f"{self.folder.path}: {how}, {self._summary()}")

    def _start(self) -> str:
        self.engine.initialise()
        origin = self.recipe.train.init_from
        if origin is None:
            return "new run"
        pieces = self.engine.pieces(for_saving=False, with_optimizer=False)
        if formats.is_own(origin):  # The first rank checks the sums, and each reads only what it needs.
            saved = everywhere(self.world, lambda: checkpoint.source(origin))
            with alike(self.world):
                checkpoint.load(saved, pieces)
        else:
            with alike(self.world):
                formats.load_pieces(formats.open_source(origin), pieces, self.recipe.model)
        self.engine.optimizer.take_weights()
        return f"new run from the weights of {origin}"

    def _summary(self) -> str:
        shape, length = self.recipe.model, self.recipe.data.sequence_length
        size = units.count(parameters(shape).total)
        ranks = f"{self.world.size} ranks, " if self.world.size > 1 else ""
        return (
            f"{shape.family} with {size} parameters, {units.count(flops_per_token(shape, length))}FLOP a token, "
            f"{self.recipe.train.steps} steps on {ranks}{self.device.type}"
        )


def _refuse_unfit(recipe: Recipe, world: World) -> None:
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
    check_wandb(recipe)


def _open_data(recipe: Recipe, world: World) -> tuple[Samples, Samples | None]:
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


def _end_of_document(recipe: Recipe) -> int | None:
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


@contextlib.contextmanager
def _writing(folder: Run, world: World) -> Iterator[None]:
    """Hold the folder, if this is the first rank; copy what is said to the log of the host."""
    with contextlib.ExitStack() as stack:
        everywhere(world, lambda: stack.enter_context(folder.writing()))
        if world.local_rank == 0:
            stack.enter_context(console.copied_to(folder.path / "logs" / f"{socket.gethostname()}.out"))
        yield


def _covers(steps: list[int] | None, step: int) -> bool:
    return steps is not None and steps[0] <= step <= steps[1]


def _conclude(folder: Run, world: World, state: str) -> None:
    if world.is_first:
        folder.update(state=state, ended=now())


def _failed(folder: Run, world: World, error: Exception) -> Exception:
    """Note the failure in the manifest as far as the disk allows, and say what was saved."""
    if not world.is_first:
        return error
    # On a full disk the manifest goes on saying running, which readers take for killed.
    with contextlib.suppress(OSError):
        folder.update(state="failed", ended=now(), error=str(error)[:1000])
    if not isinstance(error, (Fault, OSError)):
        return error
    saved = checkpoint.latest(folder.checkpoints)
    kept = f"step {saved.step} is saved; the same command goes on from there" if saved else "no step was saved"
    advice = getattr(error, "mend", None)
    mend = f"{advice}; {kept}" if advice else kept
    kind = type(error) if isinstance(error, Fault) else Fault
    return kind(getattr(error, "message", str(error)), mend=mend)


def results(folder: Run) -> dict[str, Any]:
    """What a run achieved: first and last validation loss, last training loss, tokens."""
    records = folder.metrics()
    valid = [record["valid_loss"] for record in records if "valid_loss" in record]
    trained = [record for record in records if "loss" in record]
    return {
        "run": str(folder.path),
        "state": folder.state,
        "steps": trained[-1]["step"] if trained else 0,
        "tokens": trained[-1]["tokens"] if trained else 0,
        "loss": trained[-1]["loss"] if trained else None,
        "valid_loss_before": valid[0] if valid else None,
        "valid_loss_after": valid[-1] if len(valid) > 1 else None,
    }
