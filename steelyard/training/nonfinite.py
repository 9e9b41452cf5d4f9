"""Root cause of steps that were skipped because a loss or a gradient was not finite: parameter, rank, micro-batch, why.

During a step the device stores the norm of each parameter's gradient and the first micro-batch whose loss is not
finite, without synchronising with the host. When the host reads that a step was skipped, all ranks recompute it with
deterministic kernels: twice from their own rows and, with data parallelism, once from a neighbour's rows.

    non-finite again, same values            data or weights; on one data-parallel rank only: persistent hardware fault
    finite now, or other values              transient hardware fault
    not decidable                            undetermined, with the reason

This costs up to three steps, so it runs for the first skipped step of a session and before a limit ends the run.
"""

from __future__ import annotations

import math
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.checkpoint.finite import listed, nonfinite
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure
from steelyard.parallel.world import World
from steelyard.tokens.dataloader import read
from steelyard.tokens.samples import Samples
from steelyard.training.engine import Engine
from steelyard.training.train_state import Counters

DATA_OR_WEIGHTS, TRANSIENT = "data or weights", "transient hardware fault"
PERSISTENT, UNDETERMINED = "persistent hardware fault", "undetermined"
HINTS = {
    DATA_OR_WEIGHTS: "lower optim.learning_rate, or inspect these samples",
    TRANSIENT: "check this machine with steelyard doctor",
    PERSISTENT: "check this machine with steelyard doctor, and resume without it",
    UNDETERMINED: "lower optim.learning_rate",
}
NOT_ONE = -1  # Instead of a micro-batch: the whole step, or the loss that an extension computes from weights.


class SkippedStep(NamedTuple):
    """The inputs needed to recompute a step. `first` and `rows`: first sample and number of samples of this rank."""

    number: int
    first: int
    rows: int
    batch: int
    labels: int
    loss_scale: float


@dataclass(frozen=True)
class NonfiniteFindings:
    """Where one rank found non-finite values when it computed a step."""

    data: int
    """The rank's index along the data axis."""
    micro_batches: tuple[int, ...] = ()
    """Those whose loss, or gradient at the embedding's output, is not finite, before any sum over ranks."""
    gradients: tuple[tuple[int, str], ...] = ()
    """Micro-batch and parameter of each gradient that is not finite, after the sum over data-parallel ranks."""


class NonfiniteCause(NamedTuple):
    """The result of recomputing a step that was not finite."""

    kind: str
    reason: str


class SkippedSteps:
    """Finds the cause of skipped steps, and fails when a limit is exceeded. All ranks call it at the same steps."""

    def __init__(self, engine: Engine, samples: Samples, world: World) -> None:
        self.engine, self.samples, self.world = engine, samples, world
        self._steps: dict[int, SkippedStep] = {}  # The steps since the last check.
        self._is_reported = False
        # Of the last skipped step: its number, the first micro-batch whose loss is not finite, the gradients' norms.
        size = 2 + len(engine.gradients.counted)
        self._noted = torch.full((size,), -1.0, dtype=torch.float64, device=engine.device)

    def note(self, step: SkippedStep, skipped: Tensor) -> None:
        """Store a step on the device if it was skipped; the host does not wait for the result."""
        self._steps[step.number] = step
        first = torch.full((1,), NOT_ONE, device=self.engine.device)
        if losses := self.engine.micro_losses:
            bad = ~torch.stack(losses).isfinite()
            first = torch.where(bad.any(), bad.int().argmax(), first)
        number = torch.full((1,), step.number, device=self.engine.device)
        noted = torch.cat([number, first, self.engine.gradients.norms.double()])
        self._noted = torch.where(skipped, noted, self._noted)

    def check(self, counters: Counters, exceeded: str | None) -> None:
        """Report the first skipped step, and raise if a limit on skipped steps is `exceeded`."""
        is_new = any(step in self._steps for step in counters.recent_skips)
        if exceeded is not None or (is_new and not self._is_reported):
            self._is_reported = True
            number, micro_batch, *norms = self._noted.tolist()
            step = self._steps.get(int(number))
            reported, hint = "", HINTS[UNDETERMINED]
            if step is not None:
                reported, hint = self._attributed(step, int(micro_batch), norms, is_latest=step.number == counters.step)
            if exceeded is not None:
                failure = RuntimeFailure(exceeded + reported, hint=hint)
                failure.shared = self.world.size > 1
                raise failure
            if self.world.is_rank0:
                console.warn(f"step {int(number)} was skipped{reported}")
        self._steps.clear()

    def _attributed(self, step: SkippedStep, micro_batch: int, norms: list[float], is_latest: bool) -> tuple[str, str]:
        """The location and cause of a skipped step as text, and the hint."""
        data = self.engine.mesh.data
        both = zip(self.engine.gradients.counted, norms, strict=True)
        gradients = tuple((NOT_ONE, f"model.{shard.name}") for shard, norm in both if not math.isfinite(norm))
        noted = self._gathered(
            NonfiniteFindings(data.index, () if micro_batch == NOT_ONE else (micro_batch,), gradients)
        )
        try:
            with deterministic_kernels():
                first, second = self._recomputed(step), self._recomputed(step)
                repeats = first == second and any(map(is_bad, first))
                swapped = self._recomputed(step, shift=1) if repeats and data.size > 1 else None
            cause = classify(first, second, swapped, is_latest)
        except torch.OutOfMemoryError:
            if self.world.size > 1:  # The other ranks wait for this one.
                raise
            first, cause = (
                [],
                NonfiniteCause(UNDETERMINED, "the device does not have enough memory to recompute the step"),
            )
        finally:
            self.engine.drop_gradients()
            last = self._steps[max(self._steps)]
            self.engine.extension.begin_step(last.number, last.batch, last.loss_scale)
        where = located(noted, first, self._hosts(), step, data.index, self.engine.recipe.train.micro_batch)
        return f": {where}. Cause: {cause.kind} ({cause.reason})", HINTS[cause.kind]

    def _recomputed(self, step: SkippedStep, shift: int = 0) -> list[NonfiniteFindings]:
        """The findings of all ranks in the step, each with the rows of the rank `shift` further along the data axis."""
        engine, data = self.engine, self.engine.mesh.data
        first = step.first + ((data.index + shift) % data.size - data.index) * step.rows
        rows = engine.batch_of(read(self.samples, first, step.rows), first)
        engine.extension.begin_step(step.number, step.batch, step.loss_scale)
        batch, _ = engine.extension.weigh(engine, rows)
        is_whole = engine.parallel_model.pipeline is not None  # A pipeline computes all micro-batches at once.
        size = step.rows if is_whole else engine.recipe.train.micro_batch
        scale = step.loss_scale / step.labels
        losses: list[Tensor] = []
        gradients: list[tuple[int, str]] = []
        with _embedding_gradients(engine) as streams:
            for number, rows in enumerate(batch.micro_batches(size)):
                engine.forward_and_backward(rows, scale)
                losses += engine.micro_losses
                gradients += self._nonfinite_gradients(NOT_ONE if is_whole else number)
            engine.add_stage_losses(batch, scale)
            gradients += self._nonfinite_gradients(NOT_ONE)
        bad = nonfinite({f"{number}": value for number, value in enumerate(losses)})
        bad += nonfinite({f"{number}": value for number, value in enumerate(streams)})
        micro_batches = tuple(sorted({int(number) for number in bad}))
        return self._gathered(NonfiniteFindings(data.index, micro_batches, tuple(gradients)))

    def _nonfinite_gradients(self, micro_batch: int) -> list[tuple[int, str]]:
        by_name = {f"model.{shard.name}": shard.gradient for shard in self.engine.param_shards}
        names = nonfinite({name: gradient for name, gradient in by_name.items() if gradient is not None})
        self.engine.drop_gradients()
        return [(micro_batch, name) for name in names]

    def _gathered(self, findings: NonfiniteFindings) -> list[NonfiniteFindings]:
        all_ranks = [findings] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(all_ranks, findings)
        return all_ranks

    def _hosts(self) -> list[str]:
        hosts = [socket.gethostname()] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(hosts, hosts[0])
        return hosts


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use deterministic kernels where torch has them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory = filled


@contextmanager
def _embedding_gradients(engine: Engine) -> Iterator[list[Tensor]]:
    """Collect the largest gradient at the embedding's output, where a backward pass ends, of each micro-batch."""
    largest: list[Tensor] = []

    def watch(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: largest.append(gradient.detach().abs().max()))

    embeddings = [model.embed for model in engine.parallel_model.stages.values() if model.embed is not None]
    handles = [embedding.register_forward_hook(watch) for embedding in embeddings]
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()


def is_bad(findings: NonfiniteFindings) -> bool:
    """Whether a rank found anything."""
    return bool(findings.micro_batches or findings.gradients)


def classify(
    first: list[NonfiniteFindings],
    second: list[NonfiniteFindings],
    swapped: list[NonfiniteFindings] | None,
    same_weights: bool,
) -> NonfiniteCause:
    """Why a step was not finite, from the findings of all ranks in two recomputations and one with swapped rows.

    In `swapped` each data-parallel rank had the rows of the next one. `same_weights` is true if no later step has
    updated the weights.
    """
    if first != second:
        return NonfiniteCause(TRANSIENT, "computed twice on the same device, the non-finite values differ")
    if not any(map(is_bad, first)):
        if same_weights:
            return NonfiniteCause(
                TRANSIENT, "computed again on the same device with deterministic kernels, all values are finite"
            )
        return NonfiniteCause(
            UNDETERMINED, "computed again, all values are finite, but the weights have changed; log.every = 1 helps"
        )
    if len(first) == 1:
        return NonfiniteCause(DATA_OR_WEIGHTS, "computed again on the only device, the same values are non-finite")
    if swapped is None:
        return NonfiniteCause(
            UNDETERMINED, "the same values are non-finite again, and no other rank holds this part of the model"
        )
    ranks = 1 + max(findings.data for findings in first)
    own, others = _by_device(first, ranks), _by_device(swapped, ranks)
    if not any(own):
        return NonfiniteCause(
            UNDETERMINED, "the same gradients are non-finite again, but only after their sum over ranks"
        )
    elsewhere = [others[(device - 1) % ranks] for device in range(ranks)]  # The same rows, computed by another rank.
    if elsewhere == own:
        return NonfiniteCause(DATA_OR_WEIGHTS, "the same values are non-finite again, on another device too")
    if not any(here and there for here, there in zip(own, elsewhere, strict=True)):
        return NonfiniteCause(PERSISTENT, "non-finite again on the same device, finite on another one")
    return NonfiniteCause(UNDETERMINED, "on another device some of the values are finite, but not all")


def _by_device(all_ranks: list[NonfiniteFindings], ranks: int) -> list[set[int]]:
    """The non-finite micro-batches, by data-axis index of the ranks that computed them."""
    bad: list[set[int]] = [set() for _ in range(ranks)]
    for findings in all_ranks:
        bad[findings.data] |= set(findings.micro_batches)
    return bad


def located(
    noted: list[NonfiniteFindings],
    again: list[NonfiniteFindings],
    hosts: list[str],
    step: SkippedStep,
    data: int,
    micro_batch: int,
) -> str:
    """The parameters, rank and micro-batch, from the values noted in the step, otherwise from its recomputation."""
    names = list(dict.fromkeys(name for each in (*noted, *again) for _, name in each.gradients))
    reported = f"non-finite gradient of {listed(names)}" if names else "all gradients are finite, but their norm is not"
    for all_ranks in (noted, again):
        for rank, findings in enumerate(all_ranks):
            for number in findings.micro_batches[:1]:
                first = step.first + (findings.data - data) * step.rows + number * micro_batch
                samples = f"samples {first} to {first + micro_batch - 1}"
                return f"{reported}, from micro-batch {number} ({samples}) on rank {rank} ({hosts[rank]})"
    numbers = sorted({number for each in again for number, _ in each.gradients if number != NOT_ONE})
    of = f"micro-batch {numbers[0]}" if numbers else "no single micro-batch"
    bad = [rank for rank, findings in enumerate(again if any(map(is_bad, again)) else noted) if is_bad(findings)]
    on = f"rank {bad[0]} ({hosts[bad[0]]})" if len(bad) == 1 else "no single rank"
    return f"{reported}, from {of} on {on}"
