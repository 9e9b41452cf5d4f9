"""The training loop: one process, one device.

A run is a pure function of recipe and seed: which samples a step sees follows from how many were consumed, so a
checkpoint holds tensors and a handful of counters, and a killed run repeats its losses to the bit.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard import checkpoint, model
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import Fault, Interrupted, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run, for_training, now, session
from steelyard.sizes.model import flops_per_token, parameters
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens.loader import Loader, documents_in, read
from steelyard.tokens.samples import Samples, open_samples
from steelyard.train import device as devices
from steelyard.train import optimizer as optimizers
from steelyard.train.metrics import Recorder
from steelyard.train.schedule import learning_rate
from steelyard.train.stopping import StopRequest, stop_request


@dataclass
class Counters:
    """What a run must remember beside its tensors. `loss_sum` and `loss_tokens` reach back to the last record."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0


def run(recipe: Recipe, path: Path | None = None) -> Run:
    """Train as the recipe says, from the start or from where an unfinished run stands, and return its folder."""
    _refuse_many_ranks(recipe)
    device = devices.choose(recipe)
    total = recipe.train.steps * recipe.train.global_batch
    training = open_samples(recipe, "train", total)
    validation = _open_validation(recipe)
    folder = for_training(recipe, path)
    with folder.writing(), console.copied_to(folder.path / "logs" / f"{socket.gethostname()}.out"):
        training_run = Training(recipe, folder, device, training, validation)
        begun = folder.manifest().get("started", now())
        folder.update(**session(world_size=1), device=str(device), started=begun, ended=None)
        try:
            with stop_request() as stop:
                training_run.until_done(stop)
        except Interrupted as interruption:
            folder.update(state="interrupted", ended=now())
            raise interruption
        except Exception as error:
            raise _failed(folder, error) from error
        folder.update(state="finished", ended=now())
    return folder


class Training:
    """A model in training and everything that changes with it."""

    def __init__(
        self, recipe: Recipe, folder: Run, device: torch.device, training: Samples, validation: Samples | None
    ) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.training, self.validation = training, validation
        self.end_of_document = _end_of_document(recipe)
        self.counters = Counters()
        with device:
            self.model = model.build(recipe.model)
        self.optimizer = optimizers.build(self.model, recipe.optim)
        self.recorder = Recorder(recipe, folder)
        self._start_or_resume()
        folder.follow(recipe)

    def until_done(self, stop: StopRequest) -> None:
        """Take the steps that are left."""
        recipe, counters = self.recipe, self.counters
        steps, every = recipe.train.steps, recipe.checkpoint.every
        tokens_per_step = recipe.train.global_batch * recipe.data.sequence_length
        done = counters.step * tokens_per_step
        batches = Loader(self.training, recipe.train.global_batch, consumed=counters.samples)
        bar = console.progress("train", steps * tokens_per_step, "tokens", done=done)
        with bar as progress, self.recorder, batches:
            if counters.step == 0:
                self._validate()
            while counters.step < steps:
                started = time.perf_counter()
                rate = learning_rate(recipe.optim, counters.step + 1, steps)
                batch = next(batches)
                loss_sum, grad_norm = self._step(torch.from_numpy(batch.rows), rate)
                counters.step += 1
                counters.samples = batch.consumed
                counters.tokens += tokens_per_step
                counters.loss_sum += loss_sum
                counters.loss_tokens += tokens_per_step
                self.recorder.step_took(time.perf_counter() - started, tokens_per_step)
                loss = loss_sum / tokens_per_step
                if not math.isfinite(loss):
                    raise Fault(f"the loss became {loss} at step {counters.step}", mend="lower optim.learning_rate")
                if counters.step % recipe.log.every == 0 or counters.step == steps:
                    self._record(rate, grad_norm)
                progress.advance(tokens_per_step, note=f"step {counters.step}/{steps}  loss {loss:.3f}")
                last = counters.step == steps
                if last or (recipe.eval.every and counters.step % recipe.eval.every == 0):
                    self._validate()
                if last or stop.asked or (every and counters.step % every == 0):
                    self._save()
                if stop.asked and not last:
                    raise Interrupted(
                        f"saved step {counters.step} of {steps}; the same command resumes {self.folder.path}"
                    )

    def _step(self, tokens: Tensor, rate: float) -> tuple[float, float]:
        """One optimizer step; returns the summed loss of its tokens and the gradient norm before clipping."""
        train, optim = self.recipe.train, self.recipe.optim
        labels_in_batch = tokens[:, 1:].numel()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in tokens.split(train.micro_batch):
            loss = self._loss_sum(micro)
            (loss / labels_in_batch).backward()
            loss_sum += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum.item(), float(grad_norm)

    def _loss_sum(self, tokens_BL: Tensor) -> Tensor:
        if tokens_BL.max() >= self.recipe.model.vocab:
            raise UserError(f"the data holds the id {tokens_BL.max()}, but model.vocab is {self.recipe.model.vocab}")
        positions_BL, documents_BL = self._documents(tokens_BL)
        tokens_BL = tokens_BL.to(self.device, non_blocking=True)
        with devices.precision(self.recipe, self.device):
            logits = self.model(tokens_BL[:, :-1], positions_BL, documents_BL)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens_BL[:, 1:].flatten(), reduction="sum")

    def _documents(self, tokens_BL: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Positions and document numbers, where the recipe asks to keep documents apart."""
        data = self.recipe.data
        if self.end_of_document is None:
            return None, None
        documents = documents_in(tokens_BL.numpy(), self.end_of_document)
        positions = torch.from_numpy(documents.position).to(self.device) if data.reset_positions else None
        numbers = torch.from_numpy(documents.number).to(self.device) if data.mask_documents else None
        return positions, numbers

    def _validate(self) -> None:
        """Measure the loss on the validation share: the same samples every time."""
        if self.validation is None:
            return
        train = self.recipe.train
        loss_sum, labels = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for number in range(self.recipe.eval.batches):
                tokens = torch.from_numpy(read(self.validation, number * train.global_batch, train.global_batch))
                for micro in tokens.split(train.micro_batch):
                    loss_sum += self._loss_sum(micro).item()
                    labels += micro[:, 1:].numel()
        self.model.train()
        valid_loss = loss_sum / labels
        self.recorder.record({"step": self.counters.step, "valid_loss": valid_loss})
        console.say(
            f"step {self.counters.step}: validation loss {valid_loss:.4f}, perplexity {units.perplexity(valid_loss)}"
        )

    def _record(self, rate: float, grad_norm: float) -> None:
        counters = self.counters
        loss = counters.loss_sum / counters.loss_tokens
        self.recorder.record(
            {
                "step": counters.step,
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": rate,
                "tokens": counters.tokens,
            }
            | self.recorder.speed()
        )
        counters.loss_sum, counters.loss_tokens = 0.0, 0

    def _save(self) -> None:
        keep = self.recipe.checkpoint.keep_last
        checkpoint.save(self.folder.checkpoints, self._tensors(), asdict(self.counters), keep)

    def _start_or_resume(self) -> None:
        shape = self.recipe.model
        saved = checkpoint.latest(self.folder.checkpoints)
        if saved is None:
            model.initialise(self.model, self.recipe.train.seed, shape.init_std, shape.layers)
            self.folder.forget_after(-1)
            console.say(f"{self.folder.path}: new run, {self._summary()}")
            return
        if saved.step > self.recipe.train.steps:
            raise UserError(
                f"{self.folder.path} is at step {saved.step} already, beyond train.steps = {self.recipe.train.steps}",
                where=self.recipe.where("train.steps"),
                mend="ask for more steps, or give another --run",
            )
        optimizers.make_state(self.model, self.optimizer)
        checkpoint.load(saved, self._tensors())
        self.counters = Counters(**saved.state)
        self.folder.forget_after(saved.step)
        console.say(f"{self.folder.path}: resumed at step {saved.step}, {self._summary()}")

    def _tensors(self) -> dict[str, Tensor]:
        weights = {f"model.{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        return weights | optimizers.state_tensors(self.model, self.optimizer)

    def _summary(self) -> str:
        shape, length = self.recipe.model, self.recipe.data.sequence_length
        size = units.count(parameters(shape).total)
        return (
            f"{shape.family} with {size} parameters, {units.count(flops_per_token(shape, length))}FLOP a token, "
            f"{self.recipe.train.steps} steps on {self.device}"
        )


def _open_validation(recipe: Recipe) -> Samples | None:
    wanted = recipe.eval.batches * recipe.train.global_batch
    try:
        return open_samples(recipe, "valid", wanted)
    except UserError as error:
        if recipe.data.valid:
            raise
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


def _refuse_many_ranks(recipe: Recipe) -> None:
    needed = recipe.parallel.least_world
    if needed > 1:
        raise UserError(
            f"the plan needs {needed} ranks, and this process is alone",
            where=recipe.where("parallel"),
            mend="set parallel.tensor, context, pipeline and data to 1, or drop the section",
        )


def _failed(folder: Run, error: Exception) -> Exception:
    """Note the failure in the manifest as far as the disk allows, and say what was saved."""
    with contextlib.suppress(
        OSError
    ):  # On a full disk the manifest goes on saying running, which readers take for killed.
        folder.update(state="failed", ended=now(), error=str(error)[:1000])
    if not isinstance(error, (Fault, OSError)):
        return error
    saved = checkpoint.latest(folder.checkpoints)
    kept = f"step {saved.step} is saved; the same command goes on from there" if saved else "no step was saved"
    advice = getattr(error, "mend", None)
    return Fault(getattr(error, "message", str(error)), mend=f"{advice}; {kept}" if advice else kept)


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
